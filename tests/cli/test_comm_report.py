"""``weft train --comm-report``: a table for people, a file for programs."""

import json
from pathlib import Path

import pytest

from weft.cli.main import run


def test_what_a_step_sends_is_shown_and_kept(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "tiny.yaml", "--out", "mine", "--steps", "8", "--comm-report"]
    assert run(arguments) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    record = json.loads((here / "mine/comm.json").read_text())
    parameters = json.loads((here / "mine/summary.json").read_text())["parameters"]
    assert record["steps"] == 8
    rows = {(row["rank"], row["name"]): row for row in record["per_step"]}
    # Evaluations, saves and the memory of all ranks come between steps, and are not among them.
    assert set(rows) == {(r, name) for r in range(2) for name in ("gradients", "step totals")}
    sent = rows[1, "gradients"].pop("bytes")
    assert 4 * parameters <= sent < 4.02 * parameters, "fp32, each parameter at an aligned place"
    assert rows[1, "gradients"] == {
        "rank": 1,
        "name": "gradients",
        "link": "node",
        "calls": 1.0,
        "messages": 2.0,
        "peers": [0],
    }
    megabytes = f"{2 * sent / 1e6:.3f}"
    assert ["gradients", "node", "1", "4", megabytes, "1"] in printed


def test_nothing_is_kept_unasked(here: Path) -> None:
    assert run(["train", "tiny.yaml", "--out", "mine", "--steps", "2", "--quiet"]) == 0
    assert not (here / "mine/comm.json").exists()

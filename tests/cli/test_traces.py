"""``weft train --profile``: traces that name what the schedule does, and who waited for what."""

import gzip
import json
from pathlib import Path

import pytest

from weft.cli.main import run


def test_two_steps_are_traced(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = "plan.stages=[{layers: 1}, {}]"
    arguments = ["train", "tiny.yaml", stages, "--out", "mine", "--steps", "5", "--profile"]
    assert run(arguments) == 0
    record = json.loads((here / "mine/profile/summary.json").read_text())
    assert record["steps"] == [3, 4]
    for rank, row in enumerate(record["ranks"]):
        assert row["rank"] == rank
        assert {"activations", "step totals"} <= set(row["waits_s"])
        assert 0 < sum(row["waits_s"].values()) < row["step_s"]
        trace = json.loads(gzip.decompress((here / "mine/profile" / row["file"]).read_bytes()))
        names = [event.get("name") for event in trace["traceEvents"] if event.get("ph") == "X"]
        for kind in "FB":
            assert names.count(f"{kind}{rank}.0") == 2, "once in each of two steps"
        assert names.count("update") == 2
        assert "wait: activations" in names
    printed = capsys.readouterr().out
    assert "traces of steps 3 to 4: mine/profile/rank*.json.gz" in printed
    assert "of it waiting for others: " in printed
    assert not (here / "mine/profile/summary.json.tmp").exists()

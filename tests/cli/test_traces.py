"""``weft train --profile``: traces that name what the schedule does, and who waited for what."""

import gzip
import json
from pathlib import Path

import pytest
from report.report_page import SECTIONS, read, rows, section

from weft.cli.main import run


def test_two_steps_are_traced(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = "plan.stages=[{layers: 1}, {}]"
    asked = ["--steps", "5", "--profile", "--comm-report"]
    assert run(["train", "tiny.yaml", stages, "--out", "mine", *asked]) == 0
    waits = json.loads((here / "mine/summary.json").read_text())["waits"]
    assert waits and not any("profile" in each["waits_s"] for each in waits)
    assert "profile" not in (here / "mine/comm.json").read_text()
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
        assert {"wait: activations", "call: activations"} <= set(names)
        parts = row["parts_s"]
        assert list(parts) == ["computing", "exposed communication", "host waits", "idle"]
        assert sum(parts.values()) == pytest.approx(row["step_s"])
        assert parts["computing"] > 0 < parts["exposed communication"]
        assert {
            ("computing", "F"),
            ("computing", "B"),
            ("exposed communication", "activations"),
        } <= {(each["part"], each["name"]) for each in row["names"]}
        memory = row["memory"]
        kept = memory["kept_bytes"]
        assert kept["optimizer"] == 2 * kept["parameters"] > 0, "AdamW has two moments"
        assert memory["peak_bytes"] == max(memory["bytes"]) > sum(kept.values())
        assert memory["bytes"][0] < memory["peak_bytes"]
    printed = capsys.readouterr().out
    assert "traces of steps 3 to 4: mine/profile/rank*.json.gz" in printed
    assert "of it waiting for others: " in printed
    assert "exposed communication " in printed
    assert not (here / "mine/profile/summary.json.tmp").exists()
    page = read(here / "mine")
    headings = [heading.text for heading in page.all("h2")]
    assert headings == [*SECTIONS[:2], "Time", "Plan", "Profile", *SECTIONS[3:]]
    by_rank, by_name, by_action = section(page, "Profile").all("table")
    assert [line[0] for line in rows(by_rank)[1:]] == ["0", "1"]
    assert ["computing", "F forward"] in [line[:2] for line in rows(by_name)]
    assert "B backward" in [line[0] for line in rows(by_action)]
    assert run(["report", "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["profile"] == record

"""``events.jsonl``: whole lines of several writers, whatever a crash leaves of one."""

import json
import re
import time
from pathlib import Path

import pytest

from weft.report.events import EVENTS_FILE, EventLog, read_events


def test_two_writers_add_lines_to_one_file_and_count_from_one_time(tmp_path: Path) -> None:
    launcher = EventLog(tmp_path, began=1000.0, watches=True)
    rank = EventLog(tmp_path, began=2000.0)
    launcher.write("restart", "restart 1", step=3, rank=1)
    rank.write("evaluation", "NaN", step=4, facts={"loss": float("nan"), "seconds": 2.5})
    lines = (tmp_path / EVENTS_FILE).read_text().splitlines()
    first, second = read_events(tmp_path / EVENTS_FILE)
    assert (first.kind, first.step, first.rank, first.message) == ("restart", 3, 1, "restart 1")
    assert first.facts["since_began_s"] == pytest.approx(first.elapsed_s, abs=60)
    assert json.loads(lines[1])["facts"] == {"loss": None, "seconds": 2.5}, "valid JSON"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.time)
    assert 0 <= second.elapsed_s - first.elapsed_s < 60, "both since the first command began"
    assert [second.seconds(fact) for fact in ("seconds", "loss", "none")] == [2.5, 0.0, 0.0]


def test_a_clock_that_is_set_loses_no_time_and_adds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set back by two hours between two commands, it goes on from where the first ended."""
    real, first = time.time, EventLog(tmp_path, watches=True)
    first.write("start", "")
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    first.write("evaluation", "")
    monkeypatch.setattr(time, "time", lambda: real() - 7200)
    EventLog(tmp_path, watches=True).write("start", "")
    events = read_events(tmp_path / EVENTS_FILE)
    times = [event.elapsed_s for event in events]
    assert times == sorted(times) and times[0] >= 0 and times[-1] < 600
    assert all(event.seconds("since_began_s") < 600 for event in events)


def test_a_line_that_a_crash_has_cut_takes_no_other_with_it(tmp_path: Path) -> None:
    file = tmp_path / EVENTS_FILE
    log = EventLog(tmp_path)
    log.write("snapshot", "whole")
    with file.open("a") as half:
        half.write('{"time": "2026-11-21T06:39:00.123Z", "ela')
    assert [event.message for event in read_events(file)] == ["whole"]
    EventLog(tmp_path).write("restart", "after it")
    log.write("end", "the last")
    with file.open("ab") as more:
        more.write(b'[1, 2]\n\xff\xfe\n{"kind": "end"}\n')
    assert [event.message for event in read_events(file)] == ["whole", "after it", "the last"]


def test_who_speaks_for_nobody_writes_nothing_and_no_log_ends_a_run(tmp_path: Path) -> None:
    EventLog().write("start", "nobody")
    EventLog(tmp_path / "gone").write("start", "nowhere")
    assert not list(tmp_path.iterdir())
    assert read_events(tmp_path / EVENTS_FILE) == []
    before = len(list(Path("/proc/self/fd").iterdir()))
    log = EventLog(tmp_path)
    for _ in range(3):
        log.write("start", "somebody")
    assert len(list(Path("/proc/self/fd").iterdir())) == before

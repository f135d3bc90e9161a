"""The timeline of a run on its page: when it was at work, what happened, where the time went."""

import json
from pathlib import Path
from typing import Any

import pytest
from report_cases import make_run
from report_page import SECTIONS, read, rows, section

DAY = 86400.0


def line(kind: str, at: float, message: str, step: int | None = None, **facts: Any) -> str:
    record = {"time": "", "elapsed_s": at, "kind": kind, "step": step, "rank": None}
    return json.dumps({**record, "message": message, "facts": facts})


LINES = [
    line("start", 4, "training begins", 0, startup_s=4.0),
    line("evaluation", 20, "held-out loss 5.5", 30, seconds=2.0),
    line("save_begun", 20.1, "copied the state after step 30", 30, stall_s=0.1),
    line("epoch_end", 34, "rank 1: was ended by SIGKILL <from outside>", 40, cause="signal"),
    line("restart", 34, "restart 1 of 3 begins", 40),
    line("restore", 35, "restored from memory", 30, seconds=0.5),
    line("start", 36, "training goes on after step 30", 30, startup_s=36.0, lost_s=5.0,
         last_step=40, last_s=29.0),
    line("start", DAY, "training goes on after step 60", 60, startup_s=10.0, last_step=60,
         last_s=20.0),
    line("from a newer Weft", DAY + 60, "something", 120),
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """120 steps of half a second each, over three starts; the last is over 60 s after a day."""
    folder = make_run(tmp_path)
    (folder / "events.jsonl").write_text("\n".join(LINES) + '\n{"time": "cut')
    return folder


def test_one_timeline_has_every_event(run: Path) -> None:
    page = read(run)
    assert [h.text for h in page.all("h2")] == [*SECTIONS[:2], "Time", *SECTIONS[2:]]
    assert page.one("nav").one("a", href="#time").text == "Time"
    found = section(page, "Time")
    tips = "\n".join(title.text for title in found.all("title"))
    for message in (json.loads(each)["message"] for each in LINES):
        assert message in tips
    labels = [
        each.one("span").text for each in found.all("div") if each.attributes.get("class") == "row"
    ]
    assert labels == [
        "in all", "starts", "copied and saved", "evaluated", "lost", "begun", "others",
    ]  # fmt: skip


def test_what_numbers_and_times_showed_has_rows_of_its_own(run: Path) -> None:
    odd = [
        line("not_finite", 21, "loss nan", 31),
        line("spike", 22, "a spike of 9 deviations", 32),
        line("rewind", 22, "going back, 1 of 3 times", 32),
        line("straggler", 24, "rank 1 is slow", 34),
        line("drift", 25, "a step takes 1 s", 35),
    ]
    (run / "events.jsonl").write_text("\n".join([LINES[0], *odd]) + "\n")
    found = [
        (each.one("span").text, sum(" " in title.text for title in each.all("title")))
        for each in section(read(run), "Time").all("div")
        if each.attributes.get("class") == "row"
    ]
    assert found[2:] == [("odd numbers", 2), ("slow", 2), ("begun", 1)]


def test_time_in_which_nobody_ran_it_is_left_out(run: Path) -> None:
    """At work for 56 s until the last step before the night, and from ten seconds before the last
    start to its last step, 60 s after it: 126 s, 60 of them in steps that count."""
    found = section(read(run), "Time")
    assert found.one("p").text.startswith("Goodput 48% of 2m06s: ")
    assert "nobody ran it for 23h58m" in found.one("p").text
    shares, listed = map(rows, found.all("table"))
    assert shares[1] == ["Steps that count", "60 s", "48%"]
    assert ["Steps done again", "5 s", "4.0%"] in shares
    assert listed[1:3] == [
        ["4s", "start", "0", "", "training begins"],
        ["20s", "evaluation", "30", "", "held-out loss 5.5"],
    ]
    assert len(listed) == 1 + len(LINES)


def test_many_events_are_few_marks(run: Path) -> None:
    many = [line("snapshot", 40 + n / 1000, f"copy {n}", n) for n in range(5000)]
    (run / "events.jsonl").write_text("\n".join([LINES[0], *many]) + "\n")
    found = section(read(run), "Time")
    tips = [title.text for title in found.all("title")]
    assert len(tips) < 100
    assert any("copy 0\n" in tip and " more" in tip for tip in tips)
    assert found.all("table")[1].one("caption").text == "The last 100 events of 5001"


def test_events_without_a_start_draw_nothing(run: Path) -> None:
    (run / "events.jsonl").write_text("\n".join(LINES[3:5]) + "\n")
    assert [h.text for h in read(run).all("h2")] == SECTIONS

"""Which part of a run's time went into steps that count, from files written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from weft.report.events import Event
from weft.report.goodput import Goodput, goodput, goodput_in_words, left_by, spans
from weft.report.metrics import StepMetrics


def event(kind: str, at: float, step: int | None = None, **facts: Any) -> Event:
    return Event(time="", elapsed_s=at, kind=kind, step=step, facts=facts)


def rows(first: int, last: int, *, took: float) -> list[StepMetrics]:
    """Steps one after another from the start of theirs on."""
    return [
        StepMetrics(
            step=step,
            loss=4.0,
            tokens=100,
            grad_norm=1.0,
            lr=1e-3,
            step_time_s=took,
            tokens_per_s=100 / took,
            memory_gib=0.5,
            mfu=None,
            samples=step,
            elapsed_s=took * (step - first + 1),
        )
        for step in range(first, last + 1)
    ]


def found(events: list[Event], steps: list[StepMetrics]) -> tuple[Goodput, dict[str, float]]:
    """And the parts that are not nothing, which add up to the whole."""
    result = goodput(events, steps)
    assert result is not None
    parts = {key: round(v, 6) for key, v in result.to_json().items() if v and key != "share"}
    assert sum(parts.values()) == pytest.approx(2 * result.wall_s)
    return result, parts


def test_a_run_without_trouble() -> None:
    """4 s to begin, ten steps of 2 s; a copy of 0.5 s, an evaluation of 1 s, a last save of 3 s."""
    events = [
        event("start", 4, 0, startup_s=4.0, lost_s=0.0),
        event("evaluation", 15, 5, seconds=1.0),
        event("save_begun", 15.5, 5, stall_s=0.5),
        event("save_finished", 17, 5, seconds=1.5),
        event("save_finished", 29, 10, seconds=3.0, stall_s=3.0),
        event("end", 30, 10),
    ]
    result, parts = found(events, rows(1, 10, took=2.0))
    assert result.share == pytest.approx(20 / 30)
    assert parts == {
        "wall_s": 30,
        "useful_s": 20,
        "startup_s": 4,
        "evaluation_s": 1,
        "saving_s": 3.5,
        "other_s": 1.5,
    }


def test_a_rank_is_lost_and_the_run_goes_on_from_memory() -> None:
    """Begun at 3; the last sign is step 6, at 9.5; found lost at 10; at 11 it goes on from memory,
    where step 4 is: steps 5 and 6 are done again, and it is at work after step 8."""
    events = [
        event("start", 3, 0, startup_s=3.0),
        event("snapshot", 7, 4, stall_s=0.25),
        event("epoch_end", 10, 6, cause="signal"),
        event("restart", 10, 6),
        event("restore", 11, 4, seconds=0.25, source="memory"),
        event("start", 11, 4, startup_s=11.0, lost_s=2.0, last_step=6, last_s=6.5),
    ]
    steps = [*rows(1, 4, took=1.0), *rows(5, 8, took=1.0)]
    first, second = spans(events, steps)
    assert (first.last_s, first.over_s, second.begin_s, second.is_restart) == (9.5, 10, 10, True)
    assert found(events, steps)[1] == {
        "wall_s": 15,
        "useful_s": 8,
        "startup_s": 3 + 0.75,
        "restore_s": 0.25,
        "lost_s": 2,
        "saving_s": 0.25,
        "between_s": 0.5,
        "other_s": 0.25,
    }


@pytest.mark.parametrize(("kind", "told"), [("replan", 4), ("replan", 9.25), ("balance", 4)])
def test_a_machine_that_comes_back_begins_no_command(kind: str, told: float) -> None:
    """At 9.5 there is a plan with it, or experts move; another was thought of before, and not
    taken."""
    events = [
        event("start", 3, 0, startup_s=3.0),
        event(kind, told, 1),
        event(kind, 9.5, 6),
        event("start", 11, 6, startup_s=11.0, last_step=6, last_s=6.5),
    ]
    steps = [*rows(1, 6, took=1.0), *rows(7, 8, took=1.0)]
    _, second = spans(events, steps)
    assert (second.begin_s, second.is_restart) == (9.5, True)
    assert found(events, steps)[1]["startup_s"] == 3 + 1.5


def test_nobody_runs_it_over_night() -> None:
    """Killed with its command after step 3 at 8, two steps unsaved; begun again after a day."""
    day = 86400.0
    events = [
        event("start", 5, 0, startup_s=5.0),
        event("restore", day + 4, 1, seconds=1.0),
        event("start", day + 4, 1, startup_s=4.0, lost_s=2.0, last_step=3, last_s=3.0),
        event("stop_asked", day + 6, 3),
        event("end", day + 6, 3),
    ]
    result, parts = found(events, [*rows(1, 1, took=1.0), *rows(2, 3, took=1.0)])
    assert result.share == pytest.approx(3 / 14)
    assert Goodput.from_json(result.to_json()) == result
    assert Goodput.from_json({"share": 1.0}) is None
    assert goodput_in_words(result) == (
        "goodput 21% of 14s: start-up 57%, steps done again 14%, restoring 7.1%; "
        "nobody ran it for 23h59m"
    )
    assert parts == {
        "wall_s": day + 6,
        "useful_s": 3,
        "startup_s": 5 + 3,
        "restore_s": 1,
        "lost_s": 2,
        "away_s": day - 8,
    }


def test_a_job_that_was_given_up_and_begun_again() -> None:
    """Lost at 6, restarted, lost again before it trained, given up at 8; the next command begins
    at 100 and finds step 2 of the first start."""
    events = [
        event("start", 2, 0, startup_s=2.0),
        event("epoch_end", 6, 2, cause="signal"),
        event("restart", 6, 2),
        event("epoch_end", 7, 2, cause="signal"),
        event("end", 8, cause="signal"),
        event("start", 103, 0, startup_s=3.0, lost_s=2.0, last_step=2, last_s=2.0),
        event("end", 104, 1),
    ]
    assert found(events, rows(1, 1, took=1.0))[1] == {
        "wall_s": 104,
        "useful_s": 1,
        "startup_s": 5,
        "lost_s": 2,
        "between_s": 4,
        "away_s": 92,
    }


def test_starts_that_failed_before_a_step_are_starts_of_their_own() -> None:
    """One before anything; after a run that was killed at 26 another, which was begun again once
    and given up; and a last one, which lost a rank before its first step."""
    events = [
        event("end", 2, cause="error", since_began_s=2.0),
        event("start", 23, 0, startup_s=3.0),
        event("epoch_end", 105, 0, cause="signal", since_began_s=5.0),
        event("restart", 105, 0, since_began_s=5.0),
        event("end", 107, cause="signal", since_began_s=7.0),
        event("epoch_end", 202, 0, cause="signal", since_began_s=2.0),
        event("restart", 202, 0, since_began_s=2.0),
        event("start", 206, 0, startup_s=6.0, lost_s=3.0, last_step=3, last_s=3.0),
        event("end", 207, 1),
    ]
    steps = rows(1, 1, took=1.0)
    starts = [(s.begin_s, s.start_s, s.over_s, s.is_restart) for s in spans(events, steps)]
    assert starts == [
        (0, 2, 2, False),
        (20, 23, 26, False),
        (100, 107, 107, False),
        (200, 206, 207, False),
    ]
    assert found(events, steps)[1] == {
        "wall_s": 207,
        "useful_s": 1,
        "startup_s": 2 + 3 + 7 + 6,
        "lost_s": 3,
        "away_s": 18 + 74 + 93,
    }


def test_files_that_say_little() -> None:
    assert goodput([], rows(1, 2, took=1.0)) is None
    assert goodput([event("epoch_end", 1), event("restart", 1)], []) is None
    result = goodput([event("start", 0, 0)], [])
    assert result is not None
    assert (result.wall_s, result.share) == (0, None)


def test_what_a_start_finds(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert left_by(file, 0) == {"last_step": 0, "last_s": 0.0, "lost_steps": 0, "lost_s": 0}
    lines = [
        *[{"step": n, "loss": 1.0, "step_time_s": 0.5, "elapsed_s": n / 2} for n in range(1, 6)],
        {"step": 5, "eval_loss": 2.0, "elapsed_s": 9.0},
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 6, "lo')
    assert left_by(file, 3) == {"last_step": 5, "last_s": 2.5, "lost_steps": 2, "lost_s": 1.0}
    assert left_by(file, 5) == {"last_step": 5, "last_s": 2.5, "lost_steps": 0, "lost_s": 0}

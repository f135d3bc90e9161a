"""The flight recorder: what is kept, and the one sentence that is made of it."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from weft.comm.flight_recorder import (
    KEPT_CALLS,
    Call,
    FlightRecorder,
    Stuck,
    cause_of_hang,
    is_first_of_records,
    read_records,
    record_file,
)

GROUP = (0, 1, 2)


def call(name: str, ranks: tuple[int, ...], number: int, kind: str = "group") -> Call:
    return Call(name, kind, ranks, number, bytes=8, step=12, started=1.0)  # type: ignore[arg-type]


def stuck(rank: int, waits_in: Call | None, started: int = 0, step: int = 12) -> Stuck:
    return Stuck(rank, step, waits_in, {("group", GROUP): started})


GRADIENTS = call("gradients", GROUP, 17)

SENTENCES = {
    "a rank is silent": (
        [stuck(0, GRADIENTS, 17), stuck(1, GRADIENTS, 17)],
        "rank 0 waits in 'gradients' (call 17 of ranks 0,1,2) for rank 2, which has not been "
        "heard of since step 12",
    ),
    "a rank waits for another one": (
        [stuck(0, GRADIENTS, 17), stuck(2, call("activations", (1,), 40, "receive"), 16)],
        "rank 0 waits in 'gradients' (call 17 of ranks 0,1,2) for rank 1, which has not been "
        "heard of since step 12",
    ),
    "through a third": (
        [
            stuck(0, GRADIENTS, 17),
            stuck(1, GRADIENTS, 17),
            stuck(2, call("activations", (3,), 40, "receive"), 16),
        ],
        "rank 0 waits in 'gradients' (call 17 of ranks 0,1,2) for rank 2, which waits in "
        "'activations' (receive 40) for rank 3, which has not been heard of since step 12",
    ),
    "nobody moves": (
        [
            stuck(0, call("activations", (1,), 4, "send")),
            stuck(1, call("activations", (0,), 3, "send")),
        ],
        "rank 0 waits in 'activations' (send 4) for rank 1, which waits in 'activations' (send 3) "
        "for rank 0 again: they wait for each other",
    ),
    "several are silent": (
        [stuck(0, GRADIENTS, 17, step=0)],
        "rank 0 waits in 'gradients' (call 17 of ranks 0,1,2) for rank 1 and 1 more, which has "
        "not been heard of since training began",
    ),
    "a rank computes": (
        [stuck(0, GRADIENTS, 17), stuck(1, GRADIENTS, 17), stuck(2, None, 16, step=11)],
        "rank 0 waits in 'gradients' (call 17 of ranks 0,1,2) for rank 2, which waits for nobody: "
        "it has done step 11 and computes",
    ),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_one_sentence(case: str) -> None:
    ranks, sentence = SENTENCES[case]
    assert cause_of_hang({one.rank: one for one in ranks}) == sentence


def test_without_a_rank_that_waits_there_is_nothing_to_say() -> None:
    assert cause_of_hang({}) is None
    assert cause_of_hang({0: stuck(0, None)}) is None


def test_the_last_calls_are_written_with_the_one_that_did_not_end(tmp_path: Path) -> None:
    recorder = FlightRecorder(3)
    recorder.write()
    assert not list(tmp_path.iterdir()), "nobody said where"
    recorder.keep_in(tmp_path, patience_s=1000)
    for number in range(KEPT_CALLS + 5):
        first = recorder.begin("gradients", "group", (0, 3), 40)
        recorder.wait(first)
        recorder.end(first)
        assert first.number == number + 1
    recorder.step = 9
    other = recorder.begin("activations", "receive", (1,), 16)
    recorder.wait(other)
    recorder.write()
    record = json.loads((tmp_path / "flight-rank3.json").read_text())
    assert len(record["calls"]) == KEPT_CALLS
    assert record["calls"][-1]["ended"] is None
    assert record["calls"][-2]["ended"] >= record["calls"][-2]["started"]
    read = read_records(tmp_path)[3]
    assert read.waits_in is not None
    assert read.waits_in.started == pytest.approx(time.time(), abs=60), "for people, as clocks say"
    times = {"started": other.started, "waiting_since": other.waiting_since}
    assert replace(read.waits_in, **times) == other
    assert (read.step, read.started) == (
        9,
        {("group", (0, 3)): KEPT_CALLS + 5, ("receive", (1,)): 1},
    )


def test_a_clock_that_is_set_changes_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, real = FlightRecorder(0), time.time
    for ahead_s in (3600.0, -7200.0):
        call = recorder.begin("gradients", "group", (0, 1), 8)
        recorder.wait(call)
        monkeypatch.setattr(time, "time", lambda ahead_s=ahead_s: real() + ahead_s)
        recorder.end(call)
    assert 0 <= recorder.waited_s < 600


def test_a_call_that_lasts_is_written_before_anybody_gives_up(tmp_path: Path) -> None:
    recorder = FlightRecorder(0)
    recorder.keep_in(tmp_path, patience_s=0.02)
    recorder.wait(recorder.begin("gradients", "group", (0, 1), 8))
    for _ in range(30_000):
        if (found := read_records(tmp_path).get(0)) is not None:
            break
        time.sleep(0.01)
    assert found is not None
    assert found.waits_in is not None


def test_one_rank_reads_for_all(tmp_path: Path) -> None:
    assert not is_first_of_records(tmp_path, 0)
    for rank in (12, 3, 7):
        record_file(tmp_path, rank).write_text("nobody reads this")
    assert [rank for rank in range(20) if is_first_of_records(tmp_path, rank)] == [3]

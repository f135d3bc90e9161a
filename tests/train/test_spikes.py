"""Which loss is a spike, and what a run does about it."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.checkpoint.entry import CheckpointError
from weft.config.errors import DivergedError, RunError
from weft.config.sections import RecoveryConfig
from weft.data.left_out import LeftOut
from weft.report.events import EVENTS_FILE, EventLog, read_events
from weft.train.agreeing import _found
from weft.train.history import History, Rewind, history_of, note_rewinds, read_rewinds
from weft.train.loop import Hook, StepNumbers, StepRecord
from weft.train.run_folder import REWINDS_FILE
from weft.train.spikes import Spikes
from weft.train.watch import RewoundError, watch_losses
from weft.train.worker import _has_gone_back

LOSSES = st.lists(st.floats(0.1, 20.0), min_size=1, max_size=40)


@given(losses=LOSSES, window=st.integers(2, 12), cut=st.integers(0, 40))
def test_a_resumed_run_finds_what_the_whole_one_does(
    losses: list[float], window: int, cut: int
) -> None:
    whole = Spikes(window, 4.0)
    found = [whole.add(loss) for loss in losses]
    first = Spikes(window, 4.0)
    parts = [first.add(loss) for loss in losses[:cut]]
    second = Spikes(window, 4.0, list(first.losses), is_high=first.is_high)
    assert parts + [second.add(loss) for loss in losses[cut:]] == found


@given(losses=LOSSES, scale=st.sampled_from([0.5, 2.0, 8.0]))
def test_what_is_a_spike_does_not_depend_on_the_unit(losses: list[float], scale: float) -> None:
    one, other = Spikes(8, 4.0), Spikes(8, 4.0)
    assert [one.add(loss) is None for loss in losses] == [
        other.add(scale * loss) is None for loss in losses
    ]


@given(level=st.floats(0.5, 10), steps=st.lists(st.floats(0, 0.2), min_size=30, max_size=30))
def test_a_loss_that_falls_has_no_spike(level: float, steps: list[float]) -> None:
    spikes = Spikes(10, 3.0)
    for step in steps:
        level *= 1 - step
        assert spikes.add(level) is None


def test_a_spike_is_told_of_once_and_by_hand_computed_numbers() -> None:
    spikes = Spikes(10, 5.0)
    before = [4.0, 4.1, 3.9, 4.05, 3.95]
    assert [spikes.add(loss) for loss in [*before, math.nan, 4.24]] == [None] * 7
    median = statistics.median([*before, 4.24])
    deviation = statistics.median(abs(loss - median) for loss in [*before, 4.24])
    assert (median, deviation) == pytest.approx((4.025, 0.075))
    spike = spikes.add(4.6)
    assert spike is not None
    assert (spike.loss, spike.median, spike.deviation) == pytest.approx((4.6, 4.025, 0.075))
    assert f"{spike}" == "loss 4.6000, 4.0250 ± 0.075 before: a spike of 7.67 deviations"
    assert spikes.add(9.0) is None, "the same one"
    assert spikes.add(4.0) is None
    assert spikes.add(9.0) is not None, "the next one"


def test_losses_of_nothing_are_no_measure() -> None:
    spikes = Spikes(4, 5.0)
    assert [spikes.add(loss) for loss in [0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0]] == [None] * 7
    assert spikes.add(9.0) is not None


def test_what_stays_high_is_the_new_level() -> None:
    spikes = Spikes(6, 5.0)
    found = [spikes.add(loss) for loss in [*[2.0] * 6, *[3.0] * 6]]
    assert [spike is not None for spike in found].index(True) == 6
    assert sum(spike is not None for spike in found) == 1
    assert not spikes.is_high


def hook_of(folder: Path, told: list[str], **recovery: Any) -> tuple[Hook, History]:
    """Of a run that knows two losses from before."""
    config = RecoveryConfig(spike_window=4, **recovery)
    history = history_of({"losses": [2.0, 2.0]}, 0, read_rewinds(folder), config)
    run: Any = SimpleNamespace(
        config=SimpleNamespace(recovery=config),
        history=history,
        events=EventLog(folder),
        is_main=True,
    )
    gradients = SimpleNamespace(fence=lambda: told.append("fenced"))
    run.built = SimpleNamespace(gradients=gradients)
    saver: Any = SimpleNamespace(settle=lambda: told.append("settled"))
    return watch_losses(run, saver, folder / "checkpoints", folder, told.append), history


def watched(folder: Path, losses: list[float], told: list[str], **recovery: Any) -> History:
    """What a run of these losses knows at its end."""
    hook, history = hook_of(folder, told, **recovery)
    for step, loss in enumerate(losses, start=1):
        hook(StepRecord(step=step, read=[numbers(step, loss)]))
    return history


def bads(history: History) -> tuple[int, ...]:
    return tuple(each.bad for each in history.rewinds)


def numbers(step: int, loss: float, **more: Any) -> StepNumbers:
    rest: dict[str, Any] = {"lr": 0.0, "stop": 0.0, "save": False, "move": False, "data": 0}
    rest |= {"seconds": 1.0, "ended": 0.0, "skipped": False, "loss_scale": None, "grad_norm": 1.0}
    return StepNumbers(step=step, loss=loss, **{**rest, **more})


SPIKE = "step 3: loss 9.0000, 2.0000 ± 0.01 before: a spike of 700 deviations"


def test_a_spike_is_said_and_training_goes_on(tmp_path: Path) -> None:
    told: list[str] = []
    watched(tmp_path, [2.0, 2.0, 9.0, 9.0], told)
    assert told == [f"{SPIKE} (recovery.spike_limit)"]
    (event,) = read_events(tmp_path / EVENTS_FILE)
    assert (event.kind, event.step) == ("spike", 3)
    assert event.facts == {"loss": 9.0, "median": 2.0, "deviation": 0.01}
    watched(tmp_path, [2.0, 9.0], told, when_spike="ignore")
    assert len(told) == len(read_events(tmp_path / EVENTS_FILE)) == 1


def test_a_spike_ends_the_run_where_that_is_asked(tmp_path: Path) -> None:
    says = r"^training has diverged at step 3: loss 9\.0.* goes back by itself\. Nothing finite"
    with pytest.raises(DivergedError, match=says):
        watched(tmp_path, [2.0, 2.0, 9.0], [], when_spike="stop")


def test_numbers_that_are_read_late_name_the_same_step(tmp_path: Path) -> None:
    """As on an accelerator, where those of several steps are read at once."""
    told: list[str] = []
    read = [numbers(step, loss) for step, loss in enumerate([2.0, 2.0, 9.0, 2.0, 9.0], start=1)]
    with pytest.raises(RewoundError):
        hook_of(tmp_path, told, when_spike="rewind")[0](StepRecord(step=5, read=read))
    assert told[-1] == f"{SPIKE} (recovery.spike_limit): going back, 1 of 3 times"
    assert read_rewinds(tmp_path) == (Rewind(2),)


@pytest.mark.parametrize(
    ("when_spike", "raised", "why"),
    [
        ("warn", RewoundError, r"^loss 9\.0, grad_norm inf: going back"),
        ("rewind", RewoundError, r"a spike of 700 deviations .*: going back"),
        ("stop", DivergedError, r"a spike of 700 deviations"),
    ],
)
def test_a_spike_hides_no_numbers_that_are_none(
    tmp_path: Path, when_spike: Any, raised: type[Exception], why: str
) -> None:
    hook, _ = hook_of(tmp_path, [], when_spike=when_spike, when_not_finite="rewind")
    with pytest.raises(raised, match=why):
        hook(StepRecord(step=1, read=[numbers(1, 9.0, grad_norm=math.inf)]))
    assert read_rewinds(tmp_path) == ((Rewind(0),) if raised is RewoundError else ())


def test_a_run_that_is_to_stop_leaves_going_back_to_the_next_start(tmp_path: Path) -> None:
    life: Any = SimpleNamespace()
    for stop, goes_on in ((0.0, True), (1.0, False)):
        hook, _ = hook_of(tmp_path / f"{stop}", [], when_spike="rewind")
        (tmp_path / f"{stop}").mkdir()
        record = StepRecord(step=1, read=[numbers(1, 9.0, stop=stop)])
        life.epoch = lambda _, hook=hook, record=record: hook(record)
        assert _has_gone_back(life, cast(Any, None)) == goes_on
        assert read_rewinds(tmp_path / f"{stop}") == (Rewind(0),)
    (last,) = [e for e in read_events(tmp_path / "1.0" / EVENTS_FILE) if e.kind == "end"]
    assert last.message == "stopped before step 1"


def test_a_note_that_is_none_says_how_to_mend_it(tmp_path: Path) -> None:
    (tmp_path / REWINDS_FILE).write_text('{"batch": 7}')
    with pytest.raises(RunError, match=r"rewinds\.json is no list of batches: .* as in \[7, 12\]"):
        read_rewinds(tmp_path)
    for text in ("[[7, 5]]", "[[1, 2, 3]]", "[null]", "[-1]", '[["a", 7]]'):
        (tmp_path / REWINDS_FILE).write_text(text)
        with pytest.raises(RunError, match="is no list of batches"):
            read_rewinds(tmp_path)


def test_to_begin_again_both_notes_and_checkpoints_go(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    (root / "step-00000003").mkdir(parents=True)
    (root / "step-00000003/index.json").write_text("{")
    (root / "latest").write_text("step-00000003\n")
    for also in ("", f" and {tmp_path / REWINDS_FILE}"):
        with pytest.raises(CheckpointError) as error:
            _found(root, tmp_path / REWINDS_FILE)
        assert f"Remove {root}{also} to begin the run again." in str(error.value)
        note_rewinds(tmp_path, [Rewind(95)])


def test_a_run_goes_back_so_often_and_no_more(tmp_path: Path) -> None:
    told: list[str] = []
    for number, losses in enumerate([[2.0, 2.0, 9.0], [2.0, math.nan]]):
        with pytest.raises(RewoundError):
            watched(
                tmp_path, losses, told, when_spike="rewind", when_not_finite="rewind", rewinds=2
            )
        assert [each.bad for each in read_rewinds(tmp_path)] == [2, 4][: number + 1]
    assert told == [
        *("settled", "fenced"),
        f"{SPIKE} (recovery.spike_limit): going back, 1 of 2 times",
        *("settled", "fenced"),
        "step 2: loss nan, grad_norm 1.0: going back, 2 of 2 times",
    ]
    with pytest.raises(DivergedError, match=r"and the run went back 2 times \(recovery.rewinds\)"):
        watched(tmp_path, [2.0, 9.0], told, when_spike="rewind", rewinds=2)
    assert [each.bad for each in read_rewinds(tmp_path)] == [2, 4]
    kinds = [event.kind for event in read_events(tmp_path / EVENTS_FILE)]
    assert kinds == ["spike", "rewind", "rewind", "spike"]


def test_what_is_left_out_is_settled_by_where_the_run_goes_on(tmp_path: Path) -> None:
    config = RecoveryConfig()

    def gone_on(state: Any, step: int) -> History:
        """As a start that has agreed on where it begins."""
        found = history_of(state, step, read_rewinds(tmp_path), config)
        note_rewinds(tmp_path, found.rewinds)
        return found

    note_rewinds(tmp_path, [Rewind(7)])
    back = gone_on({}, 5)
    assert back.left_out == LeftOut.of([(5, 7)])
    assert back.notes == ("left out, as the run went back: batches 5 to 7",)
    assert json.loads((tmp_path / REWINDS_FILE).read_text()) == [[5, 7]]
    later = gone_on(back.state(), 6)
    assert (later.left_out, bads(later)) == (back.left_out, (7,)), "once, however it goes on"
    note_rewinds(tmp_path, [*later.rewinds, Rewind(9)])
    again = gone_on(later.state(), 6)
    assert again.left_out == LeftOut.of([(5, 7), (9, 9)]), "the step after 5 has read batch 8"
    older = gone_on({}, 2)
    assert older.left_out == again.left_out, "from an older checkpoint it reads what it did"
    saved = history_of(older.state(), 3, read_rewinds(tmp_path), config)
    assert (saved.left_out, saved.rewinds) == (again.left_out, again.rewinds)
    elsewhere = history_of(again.state(), 6, (), config)
    assert (elsewhere.left_out, bads(elsewhere)) == (again.left_out, (7, 9)), "in another folder"
    early = history_of(older.state(), 3, elsewhere.rewinds, config)
    assert early.left_out == again.left_out, "whose notes name what was left out"
    note_rewinds(tmp_path, [*again.rewinds[:1], Rewind(9)])
    by_hand = gone_on({}, 2)
    assert by_hand.left_out == LeftOut.of([(2, 9)]), "with a rewind whose first one was taken out"

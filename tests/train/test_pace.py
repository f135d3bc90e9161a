"""Ranks that are slower than their equals or their plan, and runs slower than predicted."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train.small_jobs import SMALL, job
from train.test_life import live
from train.test_spikes import numbers

from weft.comm.address import RankAddress
from weft.comm.flight_recorder import FlightRecorder
from weft.comm.members import Member
from weft.config.sections import RecoveryConfig
from weft.elastic.pool import WorkerPool
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.report.events import EVENTS_FILE, EventLog, read_events
from weft.resolve.prediction import Prediction, Quantities
from weft.train.alarm import PATIENCE, Alarm, Paces, equals, slowness
from weft.train.engine import Engine
from weft.train.job import Job
from weft.train.loop import StepRecord
from weft.train.pace import Pace
from weft.train.run_folder import PACES_FILE

RATIOS = st.lists(st.sampled_from([0.5, 1.0, 1.2, 1.3, 1.5, 1.6, 3.0]), max_size=60)


@given(ratios=RATIOS)
def test_an_alarm_needs_three_in_a_row_to_begin_and_to_end(ratios: list[float]) -> None:
    alarm, changes = Alarm(1.5), 0
    since = 0
    for at, ratio in enumerate(ratios):
        last = ratios[max(at + 1 - PATIENCE, since) : at + 1]
        is_over = len(last) == PATIENCE and alarm.is_raised and max(last) < 1.25
        begins = len(last) == PATIENCE and not alarm.is_raised and min(last) > 1.5
        assert alarm.look(ratio) == ("raised" if begins else "over" if is_over else "")
        if begins or is_over:
            changes, since = changes + 1, at + 1
    assert alarm.is_raised == bool(changes % 2)


@given(ratios=st.lists(st.floats(1.25, 1.5), max_size=50))
def test_between_its_limits_an_alarm_stays_as_it_is(ratios: list[float]) -> None:
    alarm = Alarm(1.5)
    assert all(alarm.look(ratio) == "" for ratio in ratios)
    assert [alarm.look(2.0) for _ in range(PATIENCE)][-1] == "raised"
    assert all(alarm.look(ratio) == "" for ratio in ratios)


@given(
    pace=st.floats(0.01, 100),
    noise=st.lists(st.floats(0.95, 1.05), min_size=2, max_size=9),
    slow=st.integers(0, 8),
)
def test_one_of_equal_ranks_that_is_slow_is_found(
    pace: float, noise: list[float], slow: int
) -> None:
    slow %= len(noise)
    busy = [pace * each * (2 if rank == slow else 1) for rank, each in enumerate(noise)]
    found = slowness(busy, ["same"] * len(busy))
    assert [times is not None and times > 1.5 for times in found] == [
        rank == slow for rank in range(len(busy))
    ]


def test_ranks_without_equals_are_held_to_their_plan() -> None:
    work, predicted = ["a", "b", "c", "c"], [4.0, 1.0, 2.0, 2.0]
    assert slowness([8.0, 2.0, 4.0, 4.0], work, predicted) == [1, 1, 1, 1], "all take twice as long"
    assert slowness([8.0, 6.0, 4.0, 4.0], work, predicted) == [1, 3, 1, 1]
    assert slowness([8.0, 6.0, 4.0, 8.0], work) == [None, None, 0.5, 2.0]
    assert slowness([8.0, 6.0], ["a", "b"]) == [None, None]
    assert slowness([0.0, 0.0], ["a", "a"]) == [None, None]


def stage(ranks: tuple[int, ...], layers: tuple[int, int], **axes: int) -> StagePlan:
    return StagePlan(mesh=Mesh.of(ranks, **axes), layers=layers)


def test_equal_work_is_a_stage_and_as_many_samples() -> None:
    two = (stage((0, 1), (0, 2), dp=2), stage((2,), (2, 4)))
    plan = Plan(
        num_layers=4,
        pipelines=(
            PipelinePlan(stages=two, samples=4, microbatch=2),
            PipelinePlan(stages=(stage((3,), (0, 4)),), samples=2, microbatch=1),
            PipelinePlan(stages=(stage((4,), (0, 4)),), samples=2, microbatch=1),
            PipelinePlan(stages=(stage((5,), (0, 4)),), samples=3, microbatch=1),
        ),
    )
    work = equals(plan)
    assert [work.index(each) for each in work] == [0, 0, 2, 3, 3, 5]


def looked(
    folder: Path,
    everyone: Sequence[Sequence[float]],
    *,
    recovery: RecoveryConfig | None = None,
    busy_s: tuple[float, ...] = (),
    **predicted: Any,
) -> list[str]:
    """What is said where ranks 0 and 1 take so long in the steps that are logged."""
    recovery = recovery or RecoveryConfig()
    told: list[str] = []
    pair = (stage((0,), (0, 2)), stage((1,), (0, 2)))
    pipelines = tuple(PipelinePlan(stages=(s,), samples=2, microbatch=1) for s in pair)
    members = [Member(node=f"host{rank}/0") for rank in range(2)]
    run: Any = SimpleNamespace(
        config=SimpleNamespace(recovery=recovery, train=SimpleNamespace(log_every=10)),
        plan=Plan(num_layers=2, pipelines=pipelines),
        comm=SimpleNamespace(world_size=2, members=members, recorder=FlightRecorder(0)),
        events=EventLog(folder),
        is_main=True,
        waits_for_reads=False,
        first_step=0,
        last_step=1000,
    )
    prediction = Prediction(quantities=Quantities(**predicted), busy_s=busy_s)
    pace = Pace(run, prediction, told.append, folder)
    for at, busy in enumerate(everyone, start=1):
        pace.look(10 * at, [(1.0, each) for each in busy])
    return told


def test_a_slow_rank_is_named_once_and_so_is_its_end(tmp_path: Path) -> None:
    slow, well = [0.2, 0.5], [0.2, 0.2]
    told = looked(tmp_path, [slow, slow, well, *[slow] * 5, *[well] * 4])
    who = "rank 1 (host1, cpu)"
    assert told == [
        f"step 60: {who} computes 0.5 s a step, 2.5 times as long as ranks with the same work, "
        "for 30 steps: see what else runs there, or give it less work",
        f"step 110: {who} keeps pace again",
    ]
    events = read_events(tmp_path / EVENTS_FILE)
    assert [(e.kind, e.rank, e.step, e.facts["is_over"]) for e in events] == [
        ("straggler", 1, 60, False),
        ("straggler", 1, 110, True),
    ]
    assert events[0].facts["host"] == "host1"


def test_a_run_that_is_slower_than_predicted_says_so_once(tmp_path: Path) -> None:
    well = [[0.2, 0.2]] * 7
    assert looked(tmp_path, well, step_time_s=0.7) == []
    (said,) = looked(tmp_path, well, step_time_s=0.5)
    assert said.startswith("step 30: a step takes 1 s; 0.5 s were predicted: see what else runs")
    (event,) = read_events(tmp_path / EVENTS_FILE)
    facts = {"seconds": 1.0, "predicted_s": 0.5, "is_over": False}
    assert (event.kind, event.step, event.facts) == ("drift", 30, facts)


def test_waiting_for_others_is_not_computing() -> None:
    recorder = FlightRecorder(0)
    run: Any = SimpleNamespace(
        config=SimpleNamespace(recovery=RecoveryConfig()),
        comm=SimpleNamespace(world_size=1, recorder=recorder),
        first_step=0,
        last_step=2,
    )
    pace = Pace(run, None, lambda _: None)
    call = recorder.begin("sum", "group", (0, 1), 8)
    recorder.wait(call)
    time.sleep(0.01)
    recorder.end(call)
    assert recorder.waited_s >= 0.01
    recorder.waited.clear()
    recorder.waited["gradients"] = 6.0
    pace.count(StepRecord(step=1, read=[numbers(1, 2.0)]))  # of one second
    pace.skip()
    assert pace.taken() == [1.0, -5.0]
    recorder.waited["gradients"] += 0.25
    pace.count(StepRecord(step=2, read=[numbers(2, 2.0)]))
    recorder.waited["gradients"] += 9.0  # between steps
    pace.skip()
    pace.count(StepRecord(step=3, read=[numbers(3, 2.0)]))
    assert pace.taken() == [1.0, 0.875]


def test_what_the_first_steps_waited_for_is_no_part_of_a_step() -> None:
    """Of a run that has others: they meet and import."""
    recorder = FlightRecorder(0)
    run: Any = SimpleNamespace(
        config=SimpleNamespace(recovery=RecoveryConfig()),
        comm=SimpleNamespace(world_size=1, recorder=recorder),
        waits_for_reads=False,
        first_step=4,
        last_step=8,
    )
    pace, means = Pace(run, None, lambda _: None), []
    for number, waited_s in enumerate((9.0, 5.0, 0.25, 0.75), start=5):
        recorder.waited["gradients"] += waited_s
        pace.count(StepRecord(step=number, read=[numbers(number, 10.0)]))
        pace.skip()
        means.append(pace.waits_s)
    assert means[2:] == [{"gradients": 0.25}, {"gradients": 0.5}]
    run.last_step = 6
    pace = Pace(run, None, lambda _: None)
    recorder.waited["gradients"] += 3.0
    pace.count(StepRecord(step=5, read=[numbers(5, 10.0)]))
    assert pace.waits_s["gradients"] > 3.0, "there are no others"


def sleepy(address: RankAddress, one: Job) -> None:
    """Rank 1 takes a while after each of its steps, and longer where the machine is slow."""
    step = Engine.step

    def late(engine: Engine, *given: Any, **settings: Any) -> Any:
        began, waited_s = time.perf_counter(), engine.comm.recorder.waited_s
        result = step(engine, *given, **settings)
        worked_s = time.perf_counter() - began - (engine.comm.recorder.waited_s - waited_s)
        time.sleep(max(0.4, 3 * worked_s) * address.rank)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", late)
        live(address, [one])


def test_a_rank_that_makes_others_wait_is_found_in_a_run(tmp_path: Path, pool: WorkerPool) -> None:
    asked = [*SMALL, "plan.shares=[2,2]", "train.steps=20", "train.log_every=2"]
    pool.run(sleepy, job([*asked, "checkpoint.asynchronous=false"], tmp_path, 7), world_size=2)
    found = [e for e in read_events(tmp_path / EVENTS_FILE) if e.kind == "straggler"]
    assert [(event.rank, event.step, event.facts["is_over"]) for event in found] == [(1, 6, False)]
    assert found[0].facts["times"] > 1.5


def told(limit: float, *looks: Sequence[float]) -> list[Sequence[float]]:
    paces = Paces(limit)
    return [paces.look(each) for each in looks]


def test_paces_are_told_once_and_again_where_they_change() -> None:
    well, slow, slower = (1.0, 1.0), (1.0, 2.0), (1.0, 4.0)
    assert told(1.5, *[well] * 9) == [()] * 9
    assert told(1.5, *[(2.0, 2.0)] * 9) == [()] * 9, "all take twice as long"
    assert told(1.5, slow, slow, well, slow, slow) == [()] * 5
    assert told(1.5, *[slow] * 9) == [(), (), slow, *[()] * 6]
    found = told(1.5, *[slow] * 4, *[slower] * 4, *[well] * 5)
    assert found == [(), (), slow, (), (), (), slower, (), (), (), well, (), ()]
    assert told(1.5, slow, (1.0, 1.9), (1.0, 1.6))[-1] == (1.0, 1.9), "their median"


def test_paces_that_jump_from_rank_to_rank_are_not_told() -> None:
    jumps = [(1.0, 2.0, 1.0), (2.0, 1.0, 1.0), (1.0, 1.0, 2.0)]
    assert told(1.5, *jumps * 4) == [()] * 12


@given(
    noise=st.lists(st.tuples(st.floats(0.9, 1.1), st.floats(0.9, 1.1)), min_size=1, max_size=40),
    pace=st.floats(0.05, 20.0),
)
def test_noise_is_no_other_pace(noise: list[tuple[float, float]], pace: float) -> None:
    """Nothing is told twice of a rank that is as slow as it is."""
    looks = [(a, pace * b) for a, b in noise]
    assert sum(map(bool, told(1.5, *looks))) <= 1


def test_nothing_is_told_of_ranks_that_only_wait() -> None:
    assert told(1.5, *[(0.0, 1.0)] * 4) == [()] * 4


def test_new_paces_are_left_for_the_launcher(tmp_path: Path) -> None:
    """Once; of what a rank takes without waiting, by what the plan says of it; where it is asked
    for."""
    slow, waits = [0.2, 0.6], [0.2, 0.1]
    predicted: dict[str, Any] = {"step_time_s": 1.0, "busy_s": (0.2, 0.2)}
    file = tmp_path / PACES_FILE
    looked(tmp_path, [slow] * 5, **predicted)
    assert not file.exists()
    on = RecoveryConfig(alarm="replan")
    looked(tmp_path, [waits, [0.2, 0.2]] * 3, recovery=on, **predicted)
    assert not file.exists()
    looked(tmp_path, [slow] * 3, recovery=on)
    assert not file.exists(), "nobody knows how long they should take"
    said = looked(tmp_path, [slow] * 3, recovery=on, **predicted)
    assert json.loads(file.read_text()) == [30, [0.2, 0.2], pytest.approx([1.0, 3.0])]
    assert len(said) == 1, "and it is said, as without"
    file.unlink()
    file.mkdir()
    looked(tmp_path, [slow] * 3, recovery=on, **predicted)  # cannot be written, and ends nothing

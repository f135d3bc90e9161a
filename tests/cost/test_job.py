"""Closed forms of pipelines against the simulator and the schedules' own lists."""

from dataclasses import replace
from itertools import accumulate

import pytest

from benchmarks.job import Job, pipeline_seconds
from weft.cost.times import BorderTimes, StageTimes
from weft.models.llama.sizes import SIZES
from weft.models.registry import shape_of
from weft.schedules.interleaved import interleaved
from weft.schedules.one_forward_one_backward import one_forward_one_backward
from weft.schedules.validity import prove
from weft.schedules.zero_bubble import zero_bubble_h1
from weft.simulate.tape import write_tape

JOB = Job(shape=shape_of(SIZES["debug-1m"]), seq_len=8, global_batch=1)
CLOSE = 0.02


def times_of(forward: float, input_grad: float, weight_grad: float) -> StageTimes:
    return StageTimes(forward_s=forward, input_grad_s=input_grad, weight_grad_s=weight_grad)


def played(schedule, stages: list[StageTimes], many: int) -> float:
    positions = [list(dict.fromkeys(action.stage for action in actions)) for actions in schedule]
    tape = write_tape(prove(schedule, positions, many), positions, many)
    return tape.end(stages, [BorderTimes()] * (len(stages) - 1), 1.0)


@pytest.mark.parametrize("pp", [1, 2, 4, 7])
@pytest.mark.parametrize("slow", [1.0, 1.5])
def test_1f1b(pp, slow) -> None:
    many = 4 * pp
    stages = [times_of(1.0, 1.2, 0.8)] * (pp - 1) + [times_of(slow, 1.2 * slow, 0.8)]
    expected = played(one_forward_one_backward(pp, many), stages, many)
    assert pipeline_seconds(stages, num_microbatches=many) == pytest.approx(expected, rel=CLOSE)


@pytest.mark.parametrize(("pp", "chunks"), [(2, 2), (4, 2), (4, 3)])
def test_interleaved(pp, chunks) -> None:
    many = 4 * pp
    part = times_of(1.0, 1.0, 1.0)
    expected = played(interleaved(pp, many, chunks), [part] * (pp * chunks), many)
    position = times_of(chunks, chunks, chunks)
    got = pipeline_seconds([position] * pp, num_microbatches=many, chunks=chunks)
    assert got == pytest.approx(expected, rel=CLOSE)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_zero_bubble_h1(pp) -> None:
    stages, many = [times_of(1.0, 1.0, 1.0)] * pp, 4 * pp
    expected = played(zero_bubble_h1(pp, many), stages, many)
    got = pipeline_seconds(stages, num_microbatches=many, schedule="zb-h1")
    assert got == pytest.approx(expected, rel=CLOSE)


@pytest.mark.parametrize("hidden", [0.0, 1.0])
def test_borders_delay_the_first_and_the_last(hidden) -> None:
    stages = [times_of(1.0, 1.0, 1.0)] * 4
    apart = pipeline_seconds(stages, num_microbatches=8, border_s=0.2, border_hidden=hidden)
    alone = pipeline_seconds(stages, num_microbatches=8)
    assert apart - alone == pytest.approx(3 * 0.2 + 8 * 0.2 * (1 - hidden))


def held(schedule) -> list[int]:
    """Most forward results that each position keeps: from a forward to the end of its backward."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return [max(accumulate(change[a.kind] for a in actions)) for actions in schedule]


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("many", [1, 3, 16])
def test_held_is_what_the_lists_hold(pp, many) -> None:
    job = replace(JOB, pp=pp, global_batch=many)
    for schedule, changed in (
        (one_forward_one_backward(pp, many), job),
        (zero_bubble_h1(pp, many), replace(job, schedule="zb-h1")),
    ):
        prove(schedule, [(p,) for p in range(pp)], many)
        assert [changed.held(p) for p in range(pp)] == held(schedule)


@pytest.mark.parametrize("chunks", [2, 3])
def test_held_by_an_interleaved_pipeline(chunks) -> None:
    pp, many = 4, 16
    schedule = interleaved(pp, many, chunks)
    prove(schedule, [tuple(range(p, pp * chunks, pp)) for p in range(pp)], many)
    job = replace(JOB, pp=pp, global_batch=many, chunks=chunks)
    assert [job.held(p) * chunks for p in range(pp)] == held(schedule)


def test_layers_left_over_go_to_the_middle() -> None:
    shape = replace(JOB.shape, num_layers=30)
    counts = [work.num_layers for work in replace(JOB, shape=shape, pp=8).works()]
    assert counts == [3, 4, 4, 4, 4, 4, 4, 3]

"""The schedules by name."""

from __future__ import annotations

from weft.plan.plan import PipelinePlan, ScheduleName
from weft.schedules.action import Action
from weft.schedules.dualpipe_v import dualpipe_v
from weft.schedules.gpipe import gpipe
from weft.schedules.interleaved import interleaved
from weft.schedules.one_forward_one_backward import one_forward_one_backward
from weft.schedules.zero_bubble import zero_bubble_h1
from weft.schedules.zero_bubble_v import v_stages, zero_bubble_v


def schedule_of(pipeline: PipelinePlan) -> list[list[Action]]:
    """The actions of every position of a pipeline, as its plan names them."""
    positions, stages = len(pipeline.positions()), len(pipeline.stages)
    return schedule_named(pipeline.schedule, positions, stages, pipeline.num_microbatches)


def schedule_named(
    name: ScheduleName, num_positions: int, num_stages: int, num_microbatches: int
) -> list[list[Action]]:
    """The actions of every position, under the schedule of this name."""
    match name:
        case "gpipe":
            return gpipe(num_positions, num_microbatches)
        case "1f1b":
            return one_forward_one_backward(num_positions, num_microbatches)
        case "interleaved":
            return interleaved(num_positions, num_microbatches, num_stages // num_positions)
        case "zb-h1":
            return zero_bubble_h1(num_positions, num_microbatches)
        case "zb-v":
            return zero_bubble_v(num_positions, num_microbatches)
        case "dualpipe-v":
            return dualpipe_v(num_positions, num_microbatches)


def splits_backward(name: ScheduleName) -> bool:
    """The schedule does backward in halves: weight gradients wait for actions of their own."""
    return name in ("zb-h1", "zb-v", "dualpipe-v")


def expected_positions(pipeline: PipelinePlan) -> list[tuple[int, ...]]:
    """Where the schedule wants the stages: the numbers that each position must hold."""
    return positions_of(pipeline.schedule, len(pipeline.positions()), len(pipeline.stages))


def positions_of(name: ScheduleName, num_positions: int, num_stages: int) -> list[tuple[int, ...]]:
    """The stages that each position holds under the schedule of this name."""
    match name:
        case "interleaved":
            return [tuple(range(p, num_stages, num_positions)) for p in range(num_positions)]
        case "zb-v" | "dualpipe-v":
            return v_stages(num_positions)
        case _:
            return [(s,) for s in range(num_stages)]

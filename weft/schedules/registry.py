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
    positions, microbatches = len(pipeline.positions()), pipeline.num_microbatches
    match pipeline.schedule:
        case "gpipe":
            return gpipe(positions, microbatches)
        case "1f1b":
            return one_forward_one_backward(positions, microbatches)
        case "interleaved":
            return interleaved(positions, microbatches, len(pipeline.stages) // positions)
        case "zb-h1":
            return zero_bubble_h1(positions, microbatches)
        case "zb-v":
            return zero_bubble_v(positions, microbatches)
        case "dualpipe-v":
            return dualpipe_v(positions, microbatches)


def splits_backward(name: ScheduleName) -> bool:
    """The schedule does backward in halves: weight gradients wait for actions of their own."""
    return name in ("zb-h1", "zb-v", "dualpipe-v")


def expected_positions(pipeline: PipelinePlan) -> list[tuple[int, ...]]:
    """Where the schedule wants the stages: the numbers that each position must hold."""
    positions, stages = len(pipeline.positions()), len(pipeline.stages)
    match pipeline.schedule:
        case "interleaved":
            return [tuple(range(p, stages, positions)) for p in range(positions)]
        case "zb-v" | "dualpipe-v":
            return v_stages(positions)
        case _:
            return [(s,) for s in range(stages)]

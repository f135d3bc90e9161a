"""1F1B (PipeDream-flush, arXiv 2104.04473): alternate as soon as backwards arrive."""

from __future__ import annotations

from weft.schedules.action import Action
from weft.schedules.registry import PipelineSchedule


def one_forward_one_backward(num_positions: int, num_microbatches: int) -> list[list[Action]]:
    """One stage a position. Position ``p`` holds at most ``num_positions - p`` microbatches."""
    schedule = []
    for stage in range(num_positions):
        warmup = min(num_positions - stage - 1, num_microbatches)
        forward = [Action("F", stage, m) for m in range(num_microbatches)]
        backward = [Action("B", stage, m) for m in range(num_microbatches)]
        steady = [each for pair in zip(forward[warmup:], backward, strict=False) for each in pair]
        schedule.append(forward[:warmup] + steady + backward[num_microbatches - warmup :])
    return schedule


SCHEDULE = PipelineSchedule(
    name="1f1b",
    order=1,
    preference=0,
    actions=lambda meshes, _, microbatches: one_forward_one_backward(meshes, microbatches),
)

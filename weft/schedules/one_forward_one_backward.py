"""1F1B (PipeDream-flush, arXiv 2104.04473): alternate as soon as backwards arrive."""

from __future__ import annotations

from weft.schedules.action import Action
from weft.schedules.pipeline_schedule import PipelineSchedule


def one_forward_one_backward(num_positions: int, num_microbatches: int) -> list[list[Action]]:
    """One stage a position. Position ``p`` holds at most ``num_positions - p`` microbatches."""
    return [_one(s, num_positions, num_microbatches) for s in range(num_positions)]


def _one(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    warmup = min(num_stages - stage - 1, num_microbatches)
    forward = [Action("F", stage, m) for m in range(num_microbatches)]
    backward = [Action("B", stage, m) for m in range(num_microbatches)]
    steady = [action for pair in zip(forward[warmup:], backward, strict=False) for action in pair]
    return forward[:warmup] + steady + backward[num_microbatches - warmup :]


SCHEDULE = PipelineSchedule(
    name="1f1b",
    order=1,
    preference=0,
    actions=lambda meshes, _, microbatches: one_forward_one_backward(meshes, microbatches),
)

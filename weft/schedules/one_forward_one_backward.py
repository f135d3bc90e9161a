"""1F1B (PipeDream-flush, arXiv 2104.04473): alternate as soon as backwards arrive."""

from __future__ import annotations

from collections.abc import Sequence

from weft.schedules.action import Action
from weft.schedules.registry import PipelineSchedule


def one_forward_one_backward(num_positions: int, num_microbatches: int) -> list[list[Action]]:
    """One stage a position. Position ``p`` holds at most ``num_positions - p`` microbatches."""
    return with_in_flight(range(num_positions, 0, -1), num_microbatches)


def with_in_flight(in_flight: Sequence[int], num_microbatches: int) -> list[list[Action]]:
    """Likewise, and position ``p`` holds at most ``in_flight[p]`` microbatches.

    More than usual before a slow border hide the way there and back: forwards go on while it
    lasts. No position may hold fewer than the next one, which would wait for it for ever.
    """
    schedule = []
    for stage, held in enumerate(in_flight):
        warmup = min(held - 1, num_microbatches)
        forward = [Action("F", stage, m) for m in range(num_microbatches)]
        backward = [Action("B", stage, m) for m in range(num_microbatches)]
        steady = [each for pair in zip(forward[warmup:], backward, strict=False) for each in pair]
        schedule.append(forward[:warmup] + steady + backward[num_microbatches - warmup :])
    return schedule


SCHEDULE = PipelineSchedule(
    name="1f1b",
    order=1,
    preference=0,
    receives_as_proven=True,
    actions=lambda meshes, _, microbatches: one_forward_one_backward(meshes, microbatches),
    deeper=with_in_flight,
)

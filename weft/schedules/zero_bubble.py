"""ZB-H1 (arXiv 2401.10241): weight gradients fill the bubble, at the memory of 1F1B."""

from __future__ import annotations

from weft.schedules.action import Action
from weft.schedules.pipeline_schedule import PipelineSchedule


def zero_bubble_h1(num_positions: int, num_microbatches: int) -> list[list[Action]]:
    """One stage a position; every position holds at most ``num_positions`` microbatches.

    A microbatch is held until its weight gradient is done.
    """
    return [_one(s, num_positions, num_microbatches) for s in range(num_positions)]


def _one(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """1F1B, with each weight gradient ``stage`` microbatches late.

    What a position saves by starting its backwards earlier than the first one does, it spends on
    waiting weight gradients.
    """
    warmup = num_stages - stage - 1
    actions = [Action("F", stage, m) for m in range(min(warmup, num_microbatches))]
    for backward in range(num_microbatches + stage):
        turn = (
            Action("F", stage, backward + warmup),
            Action("I", stage, backward),
            Action("W", stage, backward - stage),
        )
        actions += [action for action in turn if 0 <= action.microbatch < num_microbatches]
    return actions


SCHEDULE = PipelineSchedule(
    name="zb-h1",
    order=3,
    preference=1,
    actions=lambda meshes, _, microbatches: zero_bubble_h1(meshes, microbatches),
    splits_backward=True,
)

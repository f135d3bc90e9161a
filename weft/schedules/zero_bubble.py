"""ZB-H1 (arXiv 2401.10241): weight gradients fill the bubble, at the memory of 1F1B."""

from __future__ import annotations

from weft.schedules.action import Action
from weft.schedules.registry import PipelineSchedule


def zero_bubble_h1(num_positions: int, num_microbatches: int) -> list[list[Action]]:
    """One stage a position; every position holds at most ``num_positions`` microbatches.

    1F1B, with each weight gradient ``stage`` microbatches late; a microbatch is held until that is
    done. What a position saves by starting its backwards earlier than the first one does, it
    spends on waiting weight gradients.
    """
    schedule = []
    for stage in range(num_positions):
        warmup = num_positions - stage - 1
        actions = [Action("F", stage, m) for m in range(min(warmup, num_microbatches))]
        for backward in range(num_microbatches + stage):
            turn = (
                Action("F", stage, backward + warmup),
                Action("I", stage, backward),
                Action("W", stage, backward - stage),
            )
            actions += [action for action in turn if 0 <= action.microbatch < num_microbatches]
        schedule.append(actions)
    return schedule


SCHEDULE = PipelineSchedule(
    name="zb-h1",
    order=3,
    preference=1,
    receives_as_proven=True,
    actions=lambda meshes, _, microbatches: zero_bubble_h1(meshes, microbatches),
    splits_backward=True,
)

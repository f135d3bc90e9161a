"""DualPipeV (the V of arXiv 2412.19437, DualPipe, cut in half): both ways of the V in turns.

Two stages a position, laid out as a V. In the steady state every position takes a forward of one
way with a backward of the other, so that what one of a pair sends travels while the other computes.
"""

from __future__ import annotations

from collections import Counter

from weft.schedules.action import Action, Kind
from weft.schedules.registry import PipelineSchedule
from weft.schedules.zero_bubble_v import v_stages

Turn = tuple[Kind, int]
"""The next action of this kind on the way down (0) or up (1)."""


def dualpipe_v(num_positions: int, num_microbatches: int) -> list[list[Action]]:
    """Every position holds at most ``2 num_positions + 1`` microbatches of a stage.

    A whole backward is its two halves in a row. The halves part where the way down ends: input
    gradients go first, and weight gradients fill what is left.

    The turns need ``2 num_positions`` microbatches; with fewer, the missing ones are left out.
    """
    rounds = max(num_microbatches, 2 * num_positions)
    schedule = []
    for position, stages in enumerate(v_stages(num_positions)):
        taken: Counter[Turn] = Counter()
        actions = []
        for turn in _turns(position, num_positions, rounds):
            kind, way = turn
            if taken[turn] < num_microbatches:
                actions.append(Action(kind, stages[way], taken[turn]))
            taken[turn] += 1
        schedule.append(actions)
    return schedule


def _turns(position: int, num_positions: int, rounds: int) -> list[Turn]:
    """What a position does, in order. Positions nearer to the turn of the V begin later."""
    later, sooner = num_positions - 1 - position, position + 1
    down: list[Turn] = [("F", 0)]
    up: list[Turn] = [("F", 1)]
    back_up: list[Turn] = [("I", 1), ("W", 1)]
    back_down: list[Turn] = [("I", 0), ("W", 0)]
    put_off = [back_up[1], back_down[1]] * sooner + [back_down[1]] * later
    ends: list[Turn] = [("I", 1), ("I", 0)]
    filled = [turn for weights in put_off[:later] for turn in (weights, ends[1])]
    return [
        *down * (2 * later),
        *(down + up) * sooner,
        *(back_up + up) * later,
        *(down + back_up + up + back_down) * (rounds - 2 * num_positions + sooner),
        *(back_up + up + back_down) * later,
        *ends * sooner,
        *filled,
        *put_off[later:],
    ]


SCHEDULE = PipelineSchedule(
    name="dualpipe-v",
    order=5,
    preference=5,
    receives_as_proven=True,
    actions=lambda meshes, _, microbatches: dualpipe_v(meshes, microbatches),
    placement=lambda meshes, _: v_stages(meshes),
    splits_backward=True,
    chunks=2,
)

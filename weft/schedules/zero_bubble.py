"""ZB-H1 (arXiv 2401.10241): weight gradients fill the bubble, at the memory of 1F1B."""

from __future__ import annotations

from weft.schedules.action import Action
from weft.schedules.greedy import Position, play


def zero_bubble_h1(num_positions: int, num_microbatches: int) -> list[list[Action]]:
    """One stage a position; every position holds at most ``num_positions`` microbatches.

    A microbatch is held until its weight gradient is done.
    """

    def wishes(position: Position) -> list[Action]:
        (stage,) = position.stages
        wanted = position.next("I", stage)
        held = position.count("F", stage) - position.count("W", stage)
        if held < num_positions:
            wanted += position.next("F", stage)
        return wanted + position.next("W", stage)

    stages_of = [(p,) for p in range(num_positions)]
    return play(stages_of, num_microbatches, wishes, split=True)

"""When a stage may let go of what it sent: as soon as the schedule proves that it has arrived.

A send cannot be asked whether it is done without waiting for it. The schedule can: an action that
depends, however far round, on the receiver's action cannot end before the receiver had the message.
"""

from __future__ import annotations

from weft.parallel.pipeline.clocks import Clocks
from weft.schedules.action import Action


def releases(clocks: Clocks, position: int) -> list[list[Action]]:
    """For every action of a position: those whose results have arrived once it has ended.

    Results that are not proven to arrive before the position's last action are left out.
    """
    own = clocks.schedule[position]
    result: list[list[Action]] = [[] for _ in own]
    for number, action in enumerate(own):
        taker = clocks.taker(action)
        if taker is None:
            continue
        holder, index = clocks.place(taker)
        later = range(number + 1, len(own))
        proof = next((i for i in later if clocks.ended(own[i], holder) > index), None)
        if proof is not None:
            result[proof].append(action)
    return result

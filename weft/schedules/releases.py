"""When a stage may let go of what it sent: as soon as the schedule proves that it has arrived.

A send cannot be asked whether it is done without waiting for it. The schedule can: an action that
depends, however far round, on the receiver's action cannot end before the receiver had the message.
"""

from __future__ import annotations

from bisect import bisect_right

from weft.schedules.action import Action
from weft.schedules.clocks import Clocks


def releases(clocks: Clocks, position: int) -> list[list[Action]]:
    """For every action of a position: those whose results have arrived once it has ended.

    Results that are not proven to arrive before the position's last action are left out.
    """
    own = clocks.schedule[position]
    result: list[list[Action]] = [[] for _ in own]
    known: dict[int, list[int]] = {}
    for number, action in enumerate(own):
        proof = 0
        for holder, index in map(clocks.place, clocks.takers(action)):
            if holder not in known:
                known[holder] = [clocks.ended(each, holder) for each in own]
            proof = max(proof, bisect_right(known[holder], index, lo=number + 1))
        if 0 < proof < len(own):
            result[proof].append(action)
    return result

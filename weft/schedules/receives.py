"""When a stage may start to receive: early, but never what cannot come before it goes on itself.

On a GPU a receive that was started is a kernel that waits, and where streams share a queue of the
hardware it holds up what was asked for after it. So a receive whose sender waits, however far
round, for an action of this position that is still to come could wait for itself.
"""

from __future__ import annotations

from weft.schedules.action import Action
from weft.schedules.clocks import Clocks

AHEAD = 2
"""Actions before its own that a receive starts at the earliest: at most as many more inputs are
held."""


def receives(clocks: Clocks, position: int, ahead: int = AHEAD) -> list[list[Action]]:
    """For every action of a position: those whose input is to be received from then on.

    One is started before its own action at the latest, and at the earliest ``ahead`` actions
    before, once the schedule proves that its sender awaits none of this position's actions from
    there on. In the order of the actions: messages of a channel are received as they are sent.
    """
    own = clocks.schedule[position]
    result: list[list[Action]] = [[] for _ in own]
    for number, action in enumerate(own):
        giver = clocks.giver(action)
        if giver is not None:
            first = max(0, number - ahead, clocks.ended(giver, position))
            result[first].append(action)
    return result

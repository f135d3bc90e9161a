"""When a stage may let go of what it sent: as soon as the schedule proves that it has arrived.

A send cannot be asked whether it is done without waiting for it. The schedule can: an action that
depends, however far round, on the receiver's action cannot end before the receiver had the message.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.schedules.action import Action, Schedule, needs

Clock = tuple[int, ...]
"""How many actions of each position have certainly ended."""


def releases(schedule: Schedule, position: int) -> list[list[Action]]:
    """For every action of a position: those whose results have arrived once it has ended.

    Results that are not proven to arrive before the position's last action are left out.
    """
    clocks = _clocks(schedule)
    where = {a: (p, i) for p, actions in enumerate(schedule) for i, a in enumerate(actions)}
    own = schedule[position]
    result: list[list[Action]] = [[] for _ in own]
    for number, action in enumerate(own):
        taker = _taker(action, where)
        if taker is None or where[taker][0] == position:
            continue
        holder, index = where[taker]
        later = range(number + 1, len(own))
        proof = next((i for i in later if clocks[own[i]][holder] > index), None)
        if proof is not None:
            result[proof].append(action)
    return result


def _taker(action: Action, where: dict[Action, tuple[int, int]]) -> Action | None:
    """The action of another stage that works on this one's result."""
    kind, stage, microbatch = action
    if kind == "W":
        return None
    taker = Action(kind, stage + 1 if kind == "F" else stage - 1, microbatch)
    return taker if taker in where else None


def _clocks(schedule: Schedule) -> dict[Action, Clock]:
    """Vector clocks: what is known to have ended when an action ends, itself included."""
    num_stages = 1 + max(action.stage for actions in schedule for action in actions)
    split = any(action.kind in "IW" for actions in schedule for action in actions)
    found: dict[Action, Clock] = {}
    known: list[Clock] = [(0,) * len(schedule)] * len(schedule)
    at = [0] * len(schedule)
    before = -1
    while before < len(found):
        before = len(found)
        for position, actions in enumerate(schedule):
            while at[position] < len(actions):
                action = actions[at[position]]
                wanted = [need.action for need in needs(action, num_stages, split=split)]
                if any(each not in found for each in wanted):
                    break
                at[position] += 1
                clock = _latest([known[position], *(found[each] for each in wanted)])
                clock = (*clock[:position], at[position], *clock[position + 1 :])
                found[action] = known[position] = clock
    assert len(found) == sum(map(len, schedule)), "the schedule never ends"
    return found


def _latest(clocks: Sequence[Clock]) -> Clock:
    return tuple(map(max, *clocks)) if len(clocks) > 1 else clocks[0]

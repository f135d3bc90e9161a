"""When a stage may let go of what it sent: as soon as the schedule proves that it has arrived.

A send cannot be asked whether it is done without waiting for it. The schedule can: an action that
depends, however far round, on the receiver's action cannot end before the receiver had the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import TopologicalSorter

from weft.schedules.action import Action, Schedule, awaited

Clock = tuple[int, ...]
"""How many actions of each position have certainly ended."""


def releases(schedule: Schedule, position: int) -> list[list[Action]]:
    """For every action of a position: those whose results have arrived once it has ended.

    Results that are not proven to arrive before the position's last action are left out.
    """
    where = {a: (p, i) for p, actions in enumerate(schedule) for i, a in enumerate(actions)}
    clocks = _clocks(schedule, where)
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


def _taker(action: Action, where: Mapping[Action, tuple[int, int]]) -> Action | None:
    """The action of another stage that works on this one's result."""
    kind, stage, microbatch = action
    if kind == "W":
        return None
    taker = Action(kind, stage + 1 if kind == "F" else stage - 1, microbatch)
    return taker if taker in where else None


def _clocks(schedule: Schedule, where: Mapping[Action, tuple[int, int]]) -> dict[Action, Clock]:
    """Vector clocks: what is known to have ended when an action ends, itself included."""
    num_stages = 1 + max(action.stage for action in where)
    split = any(action.kind in "IW" for action in where)
    before: dict[Action, list[Action]] = {}
    for action, (position, index) in where.items():
        own = schedule[position][index - 1 : index] if index else ()
        needed = (Action(*key) for key in awaited(action, num_stages, split=split))
        before[action] = [*own, *needed]
    nothing: Clock = (0,) * len(schedule)
    found: dict[Action, Clock] = {}
    for action in TopologicalSorter(before).static_order():
        position, index = where[action]
        clock = tuple(map(max, nothing, nothing, *(found[each] for each in before[action])))
        found[action] = (*clock[:position], index + 1, *clock[position + 1 :])
    return found

"""What a schedule proves: which actions of every position have ended when one of them ends."""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import TopologicalSorter

from weft.schedules.action import Action, Schedule, awaited

_Clock = tuple[int, ...]
"""How many actions of each position have certainly ended."""


class Clocks:
    """Vector clocks over a schedule's actions, each counting itself."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._where = {
            a: (p, i) for p, actions in enumerate(schedule) for i, a in enumerate(actions)
        }
        self._clocks = _clocks(schedule, self._where)

    def ended(self, action: Action, position: int) -> int:
        """How many of the position's first actions cannot but have ended when ``action`` ends."""
        return self._clocks[action][position]

    def giver(self, action: Action) -> Action | None:
        """The action of another position whose result this one works on."""
        kind, stage, microbatch = action
        return self._elsewhere(action, Action(kind, stage + (-1 if kind == "F" else 1), microbatch))

    def taker(self, action: Action) -> Action | None:
        """The action of another position that works on this one's result."""
        kind, stage, microbatch = action
        return self._elsewhere(action, Action(kind, stage + (1 if kind == "F" else -1), microbatch))

    def place(self, action: Action) -> tuple[int, int]:
        """Its position, and its number there."""
        return self._where[action]

    def _elsewhere(self, action: Action, other: Action) -> Action | None:
        if action.kind == "W" or other not in self._where:
            return None
        return None if self.place(other)[0] == self.place(action)[0] else other


def _clocks(schedule: Schedule, where: Mapping[Action, tuple[int, int]]) -> dict[Action, _Clock]:
    num_stages = 1 + max(action.stage for action in where)
    split = any(action.kind in "IW" for action in where)
    before: dict[Action, list[Action]] = {}
    for action, (position, index) in where.items():
        own = schedule[position][index - 1 : index] if index else ()
        needed = (Action(*key) for key in awaited(action, num_stages, split=split))
        before[action] = [*own, *needed]
    nothing: _Clock = (0,) * len(schedule)
    found: dict[Action, _Clock] = {}
    for action in TopologicalSorter(before).static_order():
        position, index = where[action]
        clock = tuple(map(max, nothing, nothing, *(found[each] for each in before[action])))
        found[action] = (*clock[:position], index + 1, *clock[position + 1 :])
    return found

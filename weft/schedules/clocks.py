"""What a schedule proves: which actions of a position have ended when one beside it ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import cast

from weft.schedules.action import Action, Key, Schedule, waits
from weft.schedules.validity import in_order

_Clock = Mapping[int, int]
"""By other position: how many of its actions have certainly ended."""
_Links = Mapping[Action, Sequence[Action]]


class Clocks:
    """Vector clocks over a schedule's actions; ``heads`` as ``awaited`` has it."""

    def __init__(self, schedule: Schedule, *, heads: int = 0) -> None:
        self.schedule = schedule
        self._heads = heads
        self._where = {
            a: (p, i) for p, actions in enumerate(schedule) for i, a in enumerate(actions)
        }
        self._givers, self._takers = self._links()
        self._clocks = self._ticked()

    def ended(self, action: Action, position: int) -> int:
        """How many of the position's first actions cannot but have ended when ``action`` ends.

        The position sends to that of the action, or it is its own.
        """
        place, number = self._where[action]
        return number + 1 if place == position else self._clocks[action].get(position, 0)

    def givers(self, action: Action) -> Sequence[Action]:
        """The actions of other positions whose results this one works on."""
        return self._givers.get(action, ())

    def takers(self, action: Action) -> Sequence[Action]:
        """The actions of other positions that work on this one's result."""
        return self._takers.get(action, ())

    def place(self, action: Action) -> tuple[int, int]:
        """Its position, and its number there."""
        return self._where[action]

    def _links(self) -> tuple[_Links, _Links]:
        """Of each action givers and takers."""
        givers, takers = (
            defaultdict[Action, list[Action]](list),
            defaultdict[Action, list[Action]](list),
        )
        num_stages = 1 + max((action.stage for action in self._where), default=0)
        split = any(action.kind == "I" for action in self._where)
        needs = waits(num_stages, split=split, heads=self._heads)
        where = cast("Mapping[Key, tuple[int, int]]", self._where)
        for action, (position, _) in self._where.items():
            kind, stage, microbatch = action
            for of, at, before in needs(kind, stage):
                place, index = where.get((of, at, microbatch - before), (position, 0))
                if place != position:
                    giver = self.schedule[place][index]
                    givers[action].append(giver)
                    takers[giver].append(action)
        return dict(givers), dict(takers)

    def _ticked(self) -> dict[Action, _Clock]:
        """Where positions are in a line, what one knows of the next it has from that itself; in a
        ring it may come the other way round, so that messages carry all that their sender knows."""
        now: list[_Clock] = [{} for _ in self.schedule]
        found: dict[Action, _Clock] = {}
        is_line = not self._heads and not self._is_ring()
        for action in self._where if is_line else in_order(self.schedule, heads=self._heads):
            position = self._where[action][0]
            for giver in self.givers(action):
                place, number = self._where[giver]
                carried = {} if is_line else dict(found[giver])
                carried[place] = number + 1
                own = now[position]
                news = {p: many for p, many in carried.items() if many > own.get(p, 0)}
                if news:
                    now[position] = {**own, **news}
            found[action] = now[position]
        return found

    def _is_ring(self) -> bool:
        """The first and the last of three positions or more send to each other."""
        last = len(self.schedule) - 1
        givers = (giver for action in self.schedule[0] for giver in self.givers(action))
        return last > 1 and any(self._where[giver][0] == last for giver in givers)

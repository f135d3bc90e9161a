"""What a schedule proves: which actions of a position have ended when one beside it ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.schedules.action import Action, Schedule
from weft.schedules.validity import in_order

_Clock = Mapping[int, int]
"""By other position: how many of its actions have certainly ended."""


class Clocks:
    """Vector clocks over a schedule's actions."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._where = {
            a: (p, i) for p, actions in enumerate(schedule) for i, a in enumerate(actions)
        }
        self._givers = dict(self._links())
        self._takers = {giver: action for action, giver in self._givers.items()}
        self._clocks = self._ticked()

    def ended(self, action: Action, position: int) -> int:
        """How many of the position's first actions cannot but have ended when ``action`` ends.

        The position sends to that of the action, or it is its own.
        """
        place, number = self._where[action]
        return number + 1 if place == position else self._clocks[action].get(position, 0)

    def giver(self, action: Action) -> Action | None:
        """The action of another position whose result this one works on."""
        return self._givers.get(action)

    def taker(self, action: Action) -> Action | None:
        """The action of another position that works on this one's result."""
        return self._takers.get(action)

    def place(self, action: Action) -> tuple[int, int]:
        """Its position, and its number there."""
        return self._where[action]

    def _links(self) -> Iterator[tuple[Action, Action]]:
        for action, (position, _) in self._where.items():
            kind, stage, microbatch = action
            giver = Action(kind, stage + (-1 if kind == "F" else 1), microbatch)
            if kind != "W" and self._where.get(giver, (position,))[0] != position:
                yield action, giver

    def _ticked(self) -> dict[Action, _Clock]:
        """Where positions are in a line, what one knows of the next it has from that itself; in a
        ring it may come the other way round, so that messages carry all that their sender knows."""
        now: list[_Clock] = [{} for _ in self.schedule]
        found: dict[Action, _Clock] = {}
        is_ring = self._is_ring()
        for action in in_order(self.schedule) if is_ring else self._where:
            position, giver = self._where[action][0], self._givers.get(action)
            if giver is not None:
                place, number = self._where[giver]
                carried = {**(found[giver] if is_ring else {}), place: number + 1}
                own = now[position]
                news = {p: many for p, many in carried.items() if many > own.get(p, 0)}
                now[position] = {**own, **news}
            found[action] = now[position]
        return found

    def _is_ring(self) -> bool:
        """The first and the last of three positions or more send to each other."""
        last = len(self.schedule) - 1
        givers = map(self._givers.get, self.schedule[0])
        return last > 1 and any(giver and self._where[giver][0] == last for giver in givers)

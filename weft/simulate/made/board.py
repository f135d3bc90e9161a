"""A pipeline in the middle of a step: what has been begun, and what each position could do next.

Boards are values: doing an action gives a new one, so that a search can go on from many. Only
actions that leave room for what must come can be done, so that no board is a dead end: a forward
begins where there is room for it and for the later stages that its position holds, and so the
oldest microbatch always gets on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from weft.cost.times import BorderTimes, StageTimes
from weft.schedules.action import Action, Kind

_F, _I, _W = range(3)
_SPLIT: tuple[Kind, ...] = ("F", "I", "W")
_WHOLE: tuple[Kind, ...] = ("F", "B")
FREE = BorderTimes()
_EPS = 1e-12


@dataclass(frozen=True, kw_only=True)
class Shop:
    """What a list is made for."""

    stages: Sequence[StageTimes]
    borders: Sequence[BorderTimes]
    """Between stages ``s`` and ``s + 1``; between stages of one position they cost nothing."""
    positions: Sequence[tuple[int, ...]]
    """The stages that each position holds, in model order."""
    num_microbatches: int
    room: tuple[int, ...]
    """For each position, microbatches of a stage at most that it holds."""
    split: bool
    """Backward comes in halves."""
    last: float = 1.0
    """Size of the last microbatch, as a part of a full one."""

    def __post_init__(self) -> None:
        short = [p for p, held in enumerate(self.positions) if self.room[p] < len(held)]
        assert not short, f"no room for one microbatch on positions {short}"

    def tables(self) -> Tables:
        """What boards look up."""
        kinds = _SPLIT if self.split else _WHOLE
        place = {stage: p for p, held in enumerate(self.positions) for stage in held}
        takes = [[stage.of_sizes(kind, self.last) for kind in kinds] for stage in self.stages]
        near = [place[s] == place[s + 1] for s in range(len(self.stages) - 1)]
        hops = [FREE if here else hop for here, hop in zip(near, self.borders, strict=True)]
        bounds = _Bounds(takes, hops, self)
        return Tables(
            many=self.num_microbatches,
            kinds=kinds,
            positions=tuple(self.positions),
            place=place,
            ahead=_ahead(self.positions),
            room=self.room,
            takes=takes,
            near=near,
            carry=[hop.of_sizes(self.last) for hop in hops],
            late=[hop.latency_s for hop in hops],
            is_shared=[hop.is_shared for hop in hops],
            rest=bounds.rest(),
            head=bounds.head(),
            back=bounds.back(),
        )


def _ahead(positions: Sequence[tuple[int, ...]]) -> dict[int, int]:
    return {s: len(held) - 1 - n for held in positions for n, s in enumerate(held)}


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What bounds are made of."""

    takes: list[list[tuple[float, float]]]
    hops: list[BorderTimes]
    shop: Shop

    def rest(self) -> list[float]:
        many, each = self.shop.num_microbatches, [0.0] * len(self.takes)
        for stage, takes in enumerate(self.takes):
            each[stage] = sum(one * (many - 1) + last for one, last in takes)
        return [sum(each[stage] for stage in held) for held in self.shop.positions]

    def head(self) -> list[float]:
        alone = self.shop.num_microbatches == 1
        ways = [
            stage[_F][alone] + hop.of_sizes(self.shop.last)[alone] + hop.latency_s
            for stage, hop in zip(self.takes, self.hops, strict=False)
        ]
        return list(accumulate(ways, initial=0.0))

    def back(self) -> list[float]:
        ways = [
            stage[_I][1] + hop.of_sizes(self.shop.last)[1] + hop.latency_s
            for stage, hop in zip(self.takes, self.hops, strict=False)
        ]
        return list(accumulate(ways, initial=self.takes[0][_W][1] if self.shop.split else 0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """A shop in the form in which boards look things up."""

    many: int
    """Microbatches."""
    kinds: tuple[Kind, ...]
    positions: tuple[tuple[int, ...], ...]
    place: dict[int, int]
    """The position of each stage."""
    ahead: dict[int, int]
    """By stage: later ones of its position."""
    room: tuple[int, ...]
    takes: list[list[tuple[float, float]]]
    """By stage, by kind: of a full microbatch, and of the last."""
    near: list[bool]
    """By border: it is inside a position."""
    carry: list[tuple[float, float]]
    """By border: how long a full microbatch, and the last, occupy the wire."""
    late: list[float]
    is_shared: list[bool]
    """By border: what leaves a position over it waits for what does so over others."""
    rest: list[float]
    """By position, all that it does."""
    head: list[float]
    """By stage: from the begin of the step to that of its first forward, at least."""
    back: list[float]
    """By stage: from the end of its last backward to that of the step, at least."""


@dataclass(slots=True)
class Choice:
    """An action that a position can do, and when."""

    kind: int
    stage: int
    start: float
    end: float


class Board:
    """See above. ``None`` of a list of choices: not looked up yet."""

    __slots__ = ("before", "choices", "done", "free", "held", "rest", "sent", "t", "waiting")

    def __init__(self, tables: Tables) -> None:
        t = self.t = tables
        num_stages = len(t.takes)
        self.free = [0.0] * len(t.positions)
        self.held = [0] * len(t.positions)
        self.rest = list(t.rest)
        self.sent = [0.0] * (2 * num_stages + len(t.positions))
        """When wires are free: of forwards and backwards of each stage, then of each position."""
        self.done = [(0, 0, 0)] * num_stages
        """By stage, forwards, backwards and weight gradients that were begun."""
        self.waiting: list[tuple[float, ...]] = [()] * (2 * num_stages)
        """When inputs are there that nothing has taken: of forwards, then of backwards."""
        self.waiting[0] = (0.0,) * t.many
        self.before: tuple[Board, Action] | None = None
        self.choices: list[list[Choice] | None] = [None] * len(t.positions)

    def after(self, choice: Choice) -> Board:
        """The board after an action."""
        t, kind, stage, end = self.t, choice.kind, choice.stage, choice.end
        new = Board.__new__(Board)
        place = t.place[stage]
        new.t = t
        new.free, new.held, new.rest = self.free.copy(), self.held.copy(), self.rest.copy()
        new.done, new.waiting, new.sent = self.done.copy(), self.waiting.copy(), self.sent
        new.choices = self.choices.copy()
        microbatch = self.done[stage][kind]
        is_last = microbatch == t.many - 1
        new.before = self, Action(t.kinds[kind], stage, microbatch)
        new.free[place] = end
        new.rest[place] -= t.takes[stage][kind][is_last]
        forwards, backwards, weights = self.done[stage]
        new.choices[place] = None
        if kind == _W:
            new.done[stage] = forwards, backwards, weights + 1
            new.held[place] -= 1
            return new
        queue = 2 * stage + kind
        new.waiting[queue] = self.waiting[queue][1:]
        if kind == _F:
            new.done[stage] = forwards + 1, backwards, weights
            new.held[place] += 1
            target = 2 * (stage + 1) if stage + 1 < len(t.takes) else queue + 1
        else:
            new.done[stage] = forwards, backwards + 1, weights
            new.held[place] -= len(t.kinds) == 2
            target = 2 * (stage - 1) + 1
        if target >= 0:
            new._hand_on(queue, target, end, is_last=is_last)
        return new

    def _hand_on(self, queue: int, target: int, end: float, *, is_last: bool) -> None:
        t = self.t
        stage, to = queue // 2, target // 2
        if stage != to:
            border = min(stage, to)
            if not t.near[border]:
                self.sent = self.sent.copy()
                wire = 2 * len(t.takes) + t.place[stage] if t.is_shared[border] else queue
                leaves = max(end, self.sent[wire]) + t.carry[border][is_last]
                self.sent[wire] = leaves
                end = leaves + t.late[border]
        self.waiting[target] = (*self.waiting[target], end)
        self.choices[t.place[to]] = None

    def choices_at(self, place: int) -> list[Choice]:
        """What a position could do next, as far as what it needs has been begun."""
        found = self.choices[place]
        if found is None:
            found = self.choices[place] = self._look(place)
        return found

    def _look(self, place: int) -> list[Choice]:
        t, free = self.t, self.free[place]
        found = []
        room = t.room[place] - self.held[place]
        split, last = len(t.kinds) == 3, t.many - 1
        for stage in t.positions[place]:
            takes = t.takes[stage]
            forwards, backwards, weights = self.done[stage]
            coming = self.waiting[2 * stage]
            if coming and room > t.ahead[stage]:
                start = coming[0] if coming[0] > free else free
                found.append(Choice(_F, stage, start, start + takes[_F][forwards == last]))
            coming = self.waiting[2 * stage + 1]
            if coming:
                start = coming[0] if coming[0] > free else free
                found.append(Choice(_I, stage, start, start + takes[_I][backwards == last]))
            if split and weights < backwards:
                found.append(Choice(_W, stage, free, free + takes[_W][weights == last]))
        return found

    def conflict(self) -> list[Choice]:
        """What the position could do that can be done soonest, one of which comes next: every list
        in which nothing waits for nothing comes from choices among these (Giffler and Thompson).
        Nothing that has not been begun could begin before that has ended."""
        best: Choice | None = None
        at = -1
        for place in range(len(self.free)):
            for choice in self.choices_at(place):
                if best is None or choice.end < best.end:
                    best, at = choice, place
        if best is None:
            return []
        until = max(best.end, best.start + _EPS)
        return [choice for choice in self.choices_at(at) if choice.start < until]

    def bound(self) -> tuple[float, float]:
        """Seconds that the step takes at least; and the same of all positions together."""
        least = [self._least(place) for place in range(len(self.free))]
        return max(least), sum(least)

    def _least(self, place: int) -> float:
        """When a position ends at least, and what waits for its last backward."""
        t, free, held = self.t, self.free[place], self.t.positions[place]
        least, first = free + self.rest[place], held[0]
        forwards, backwards, _ = self.done[first]
        if not forwards:
            least += max(0.0, t.head[first] - free)
        if backwards == t.many:
            return least
        # The first stage's last backward has all of its position but weights before it.
        put_off = sum(map(self._weights_s, held)) if len(t.kinds) == 3 else 0.0
        return max(least, least - put_off + t.back[first])

    def _weights_s(self, stage: int) -> float:
        """Of a stage's weight gradients that are left."""
        one, last = self.t.takes[stage][_W]
        left = self.t.many - self.done[stage][_W]
        return (left - 1) * one + last if left else 0.0

    def lists(self) -> list[list[Action]]:
        """For each position what has been begun, in order."""
        result: list[list[Action]] = [[] for _ in self.free]
        board = self
        while board.before is not None:
            board, action = board.before
            result[self.t.place[action.stage]].append(action)
        return [each[::-1] for each in result]

    @property
    def end(self) -> float:
        return max(self.free)

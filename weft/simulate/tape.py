"""A proven schedule as flat lists, so that playing it costs a few additions an action.

What waits for several others, or hands on to several, has a row of no length for each but one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, product
from typing import TYPE_CHECKING

from weft.cost.times import BorderTimes, StageTimes
from weft.plan.borders import crossed
from weft.schedules.action import Action, Kind, waits
from weft.schedules.known import Pattern, proven_order

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
_SIZES = 2
"""Of microbatches: full ones, and the last."""
_NONE = -1
_NOWHERE = BorderTimes()
SAME = 1e-9
"""Relative; rounds that differ by less are alike."""


@dataclass(frozen=True, slots=True)
class Tape:
    """Actions in an order in which they can be done; each list has an entry for each row."""

    num_positions: int
    num_chained: int
    """Stages that follow one another."""
    position: array[int]
    code: array[int]
    """Which duration: by stage, then kind, then size of the microbatch."""
    before: array[int]
    """The action at another position whose result it waits for; -1 where there is none."""
    wire: array[int]
    """Which way its result leaves the position: twice the border, plus 1 upstream; else -1."""
    first_backs: array[int]
    """The rows of the first stage's backwards, without weight gradients."""
    rows: array[int]
    """The row of each action."""
    leaves: dict[int, int] = field(default_factory=dict, kw_only=True)
    """The position that each wire leaves."""

    def play(
        self, stages: Sequence[StageTimes], borders: Sequence[BorderTimes], last: float
    ) -> tuple[list[float], list[float]]:
        """When each action has begun, and when it has ended.

        ``last``: samples of the last microbatch, as a part of a full one's.
        """
        takes, carry, late = _durations(stages, borders, last, self.num_chained)
        free, ports = [0.0] * self.num_positions, self._ports(borders)
        sent = [0.0] * (self.num_positions + 2 * len(borders))
        began: list[float] = []
        ended: list[float] = []
        arrived: list[float] = []
        for place, code, before, wire in self._rows():
            start = free[place]
            if before >= 0 and arrived[before] > start:
                start = arrived[before]
            end = free[place] = start + takes[code]
            began.append(start)
            ended.append(end)
            if wire >= 0:
                port = ports[wire]
                leaves = sent[port] if sent[port] > end else end
                sent[port] = leaves + carry[code]
                end = sent[port] + late[code]
            arrived.append(end)
        return began, ended

    def end(
        self, stages: Sequence[StageTimes], borders: Sequence[BorderTimes], last: float
    ) -> float:
        """When the last action of ``play`` has ended, computed faster than all ends."""
        return self.end_and_backs(stages, borders, last)[0]

    def end_and_backs(
        self, stages: Sequence[StageTimes], borders: Sequence[BorderTimes], last: float
    ) -> tuple[float, list[float]]:
        """Likewise, and when each of ``first_backs`` has ended: they hand nothing on."""
        takes, carry, late = _durations(stages, borders, last, self.num_chained)
        free, ports = [0.0] * self.num_positions, self._ports(borders)
        sent = [0.0] * (self.num_positions + 2 * len(borders))
        arrived: list[float] = []
        note = arrived.append
        for place, code, before, wire in self._rows():
            start = free[place]
            if before >= 0 and arrived[before] > start:
                start = arrived[before]
            end = start + takes[code]
            free[place] = end
            if wire >= 0:
                port = ports[wire]
                leaves = sent[port]
                leaves = (leaves if leaves > end else end) + carry[code]
                sent[port] = leaves
                end = leaves + late[code]
            note(end)
        return max(free), [arrived[row] for row in self.first_backs]

    def ends_and_backs(
        self, plays: Sequence[Sequence[StageTimes]], borders: Sequence[BorderTimes], last: float
    ) -> list[tuple[float, list[float]]]:
        """``end_and_backs`` of several plays, each of other stages over the same borders, all at
        once: an action is a row of numbers, one for each play, which pays where they are many."""
        import numpy as np  # what commands that answer at once do without

        _, carry, late = _durations(plays[0], borders, last, self.num_chained)
        takes = _all_durations(plays, last, len(carry))
        ports = self._ports(borders)
        free = [np.zeros(len(plays)) for _ in range(self.num_positions)]
        sent = [np.zeros(len(plays)) for _ in range(self.num_positions + 2 * len(borders))]
        arrived: list[npt.NDArray[np.float64]] = []
        for place, code, before, wire in self._rows():
            end = free[place]
            if before >= 0:
                np.maximum(end, arrived[before], out=end)
            end += takes[code]
            if wire >= 0:
                leaves = sent[ports[wire]]
                np.maximum(leaves, end, out=leaves)
                leaves += carry[code]
                arrived.append(leaves + late[code])
            else:
                arrived.append(end.copy())
        ends: list[float] = np.maximum.reduce(free).tolist()
        backs: list[list[float]] = np.array([arrived[row] for row in self.first_backs]).T.tolist()
        return list(zip(ends, backs, strict=True))

    def add(self, position: int, code: int, before: int = _NONE, wire: int = _NONE) -> int:
        """A row more; its number."""
        self.position.append(position)
        self.code.append(code)
        self.before.append(before)
        self.wire.append(wire)
        return len(self.position) - 1

    def _ports(self, borders: Sequence[BorderTimes]) -> list[int]:
        """For each wire, where it is busy: its position's port, or by itself."""
        ports = list(range(self.num_positions, self.num_positions + 2 * len(borders)))
        for wire, position in self.leaves.items():
            if borders[wire // 2].is_shared:
                ports[wire] = position
        return ports

    def _rows(self) -> Iterable[tuple[int, int, int, int]]:
        return zip(self.position, self.code, self.before, self.wire, strict=True)


def _durations(
    stages: Sequence[StageTimes],
    borders: Sequence[BorderTimes],
    last: float,
    num_chained: int,
) -> tuple[list[float], list[float], list[float]]:
    """By code: of the action; how long its result occupies the wire; how much later it is there.

    After the codes of actions one for each border of a part of the head.
    """
    ways = list(pairwise((_NOWHERE, *borders[: num_chained - 1], _NOWHERE)))
    ways += [(_NOWHERE, _NOWHERE)] * (len(stages) - num_chained)
    hops = [down if kind == "F" else up for up, down in ways for kind in _KINDS]
    hops += borders[num_chained - 1 :]
    takes = [seconds for stage in stages for seconds in _of_stage(stage, last)]
    takes += [0.0] * (len(hops) * _SIZES - len(takes))
    carry = [seconds for hop in hops for seconds in hop.of_sizes(last)]
    return takes, carry, [hop.latency_s for hop in hops for _ in range(_SIZES)]


def _of_stage(stage: StageTimes, last: float) -> list[float]:
    """Of each kind of action, and of each size of microbatch."""
    return [seconds for kind in _KINDS for seconds in stage.of_sizes(kind, last)]


def _all_durations(
    plays: Sequence[Sequence[StageTimes]], last: float, num_codes: int
) -> list[npt.NDArray[np.float64]]:
    """By code, of the action in each play. Plays have many stages in common, each made once."""
    import numpy as np

    every = {id(stage): stage for stages in plays for stage in stages}
    numbers = {key: number for number, key in enumerate(every)}
    table = np.array([_of_stage(stage, last) for stage in every.values()])
    picks = np.array([[numbers[id(stage)] for stage in stages] for stages in plays])
    takes = table[picks].reshape(len(plays), -1).T  # [codes, plays]
    rest = num_codes - len(takes)
    return [*np.ascontiguousarray(takes), *np.zeros((rest, len(plays)))]


def write_tape(
    order: Sequence[Action],
    positions: Sequence[Sequence[int]],
    num_microbatches: int,
    *,
    heads: int = 0,
) -> Tape:
    """The tape of actions in a proven order.

    ``heads``: as ``awaited`` has it.
    """
    tape = Tape(len(positions), sum(map(len, positions)) - heads, *(array("i") for _ in range(6)))
    split = any(action.kind == "I" for action in order)
    every = _tracks(tape, positions, num_microbatches, heads, split=split)
    for kind, stage, microbatch in order:
        track, size = every[kind, stage], int(microbatch == num_microbatches - 1)
        first, *others = [rows[microbatch] for rows in track.awaits] or (_NONE,)
        for before in others:
            tape.add(track.place, track.nothing, before)
        row = track.rows[microbatch] = tape.add(track.place, track.code + size, first, track.wire)
        tape.rows.append(row)
        if stage == 0 and kind in ("B", "I"):
            tape.first_backs.append(row)
        for code, wire, rows in track.fans:
            rows[microbatch] = tape.add(track.place, code + size, wire=wire)
    return tape


@dataclass(frozen=True, slots=True)
class _Track:
    """What all actions of a kind on a stage have in common."""

    place: int
    code: int
    """Of a full microbatch."""
    nothing: int
    """The code of what takes no time."""
    wire: int
    rows: list[int]
    """By microbatch, its row."""
    awaits: list[list[int]] = field(default_factory=list)
    """Rows at other positions that it waits for, by microbatch."""
    fans: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """Rows that hand its result on to parts of the head: code, wire, and by microbatch the row."""


def _tracks(
    tape: Tape,
    positions: Sequence[Sequence[int]],
    num_microbatches: int,
    heads: int,
    *,
    split: bool,
) -> dict[tuple[Kind, int], _Track]:
    """By kind and stage."""
    place_of = {stage: p for p, stages in enumerate(positions) for stage in stages}
    num_stages, chained = len(place_of), tape.num_chained
    nothing = 4 * num_stages * _SIZES
    found: dict[tuple[Kind, int], _Track] = {}
    handed: dict[tuple[Kind, int, int], list[int]] = {}
    """Rows that hand a result on to a stage, where it has some of its own."""
    for (number, kind), stage in product(enumerate(_KINDS), place_of):
        wire, rows = _wire(kind, stage, place_of, chained), [_NONE] * num_microbatches
        code = (4 * stage + number) * _SIZES
        track = found[kind, stage] = _Track(place_of[stage], code, nothing, wire, rows)
        if wire != _NONE:
            tape.leaves[wire] = track.place
        for border, taker in _fanned(kind, stage, place_of, chained, heads):
            wire, rows = 2 * border + (kind != "F"), [_NONE] * num_microbatches
            tape.leaves[wire], handed[kind, stage, taker] = track.place, rows
            track.fans.append((nothing + (border - chained + 1) * _SIZES, wire, rows))
    needs = waits(num_stages, split=split, heads=heads)
    for (kind, stage), track in found.items():
        for of, at, _ in needs(kind, stage):  # at other positions, all of its own microbatch
            if place_of[at] != track.place:
                track.awaits.append(handed.get((of, at, stage), found[of, at].rows))
    return found


def _wire(kind: Kind, stage: int, place_of: Mapping[int, int], chained: int) -> int:
    """Of a result that goes to the stage after or before, at another position."""
    target = {"F": stage + 1, "W": stage}.get(kind, stage - 1)
    place = place_of[stage]
    stays = max(stage, target) >= chained or place_of.get(target, place) == place
    return _NONE if stays else 2 * min(stage, target) + (kind != "F")


def _fanned(
    kind: Kind, stage: int, place_of: Mapping[int, int], chained: int, heads: int
) -> Iterator[tuple[int, int]]:
    """Borders of parts of the head over which a result goes, and the stages that take it."""
    for border, ends in enumerate(crossed(chained, heads) if heads else ()):
        giver, taker = ends if kind == "F" else ends[::-1]
        is_fan = ends[1] >= chained and (kind == "F" or ends[0] < chained)
        leaves = giver == stage and place_of[taker] != place_of[giver]
        if is_fan and leaves and kind != "W":
            yield border, taker


@lru_cache(maxsize=256)
def tape_of(pattern: Pattern) -> Tape:
    """The tape of a pattern; its last microbatch has a size of its own."""
    order, many = proven_order(pattern), pattern.num_microbatches
    return write_tape(order, pattern.positions, many, heads=len(pattern.heads))


def seconds_each(pattern: Pattern, backs: Sequence[float]) -> float:
    """How much longer a long step takes with a microbatch more, seen in a shorter one.

    Once it is full, a pipeline repeats itself under 1F1B and ZB-H1, though not after each
    microbatch: where a border is slow, after as many as are on their way together. Over whole
    rounds of that it grows evenly.

    Args:
        pattern: At least ``FULL_AFTER`` microbatches for each that is in flight.
        backs: When each of its tape's ``first_backs`` has ended.
    """
    most = pattern.together
    back = backs[:-most]
    best, unlike = 0.0, float("inf")
    for together in range(1, most + 1):
        each = (back[-1] - back[-1 - together]) / together
        rounds = (back[-n] - back[-n - together] for n in range(2, most + 1))
        off = max((abs(seconds - each * together) for seconds in rounds), default=0.0)
        if off < unlike * (1 - SAME):
            best, unlike = each, off
        if off <= SAME * back[-1]:
            break
    return best

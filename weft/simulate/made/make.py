"""The best list that is found for a pipeline: named ones, numbers in flight, rules, and a search.

Everything is played in modelled time and the fastest is taken, so that what is made is never slower
than what has a name. Of those that take as long it is the one that says least: a name, then a name
with numbers in flight, then a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from weft.cost.times import BorderTimes, StageTimes
from weft.plan.plan import PipelinePlan
from weft.schedules.known import Pattern, held_at_peak
from weft.schedules.notation import write
from weft.schedules.registry import SCHEDULES, by_preference
from weft.simulate.made.beam import RULES, Rule, beam, follow
from weft.simulate.made.board import Board, Shop, Tables
from weft.simulate.made.least import least_s
from weft.simulate.play import last_size
from weft.simulate.tape import tape_of

WORTH = 1e-3
"""Part of a step that numbers or a list must save over a name."""
BUDGET = 10_000
"""Actions, about, that each of the searches does: the same list comes out on every machine."""
MOST_BOARDS = 256
MOST_NUMBERS = 100
"""Of microbatches in flight that are tried, about; one is played faster than a search does it."""
FULL_AFTER = 2
"""Microbatches for each position beyond those in flight, after which as many more are taken for all
that follow where numbers in flight are compared."""
BEST_RULES = 3
"""Rules that are tried with less room too."""


@dataclass(frozen=True, kw_only=True)
class Making:
    """What a schedule is made for."""

    pipeline: PipelinePlan
    stages: Sequence[StageTimes]
    borders: Sequence[BorderTimes]
    """Between stages ``s`` and ``s + 1``; between stages of one position they cost nothing."""
    room: tuple[int, ...]
    """For each position, microbatches of its stages at most that it holds at once."""
    names: tuple[str, ...]
    """Schedules that may be taken; a single one is kept to, but for numbers in flight."""
    budget: int = BUDGET
    worth: float = WORTH
    """Part of its time that the pipeline has to save at least, or no order is looked for."""

    def seconds(self, pipeline: PipelinePlan) -> float:
        last = last_size(pipeline.samples, pipeline.microbatch)
        return tape_of(Pattern.of(pipeline)).end(self.stages, self.borders, last)

    def about(self, pipeline: PipelinePlan) -> float:
        """``seconds`` where numbers in flight are said, without playing each of many microbatches:
        they come to repeat themselves."""
        many, more = pipeline.num_microbatches, FULL_AFTER * len(self.room)
        few = max(pipeline.in_flight) + more
        if many <= few + 2 * more:
            return self.seconds(pipeline)
        low, high = (self.seconds(_of(pipeline, number)) for number in (few, few + more))
        return low + (high - low) * (many - few) / more

    def shorter(self) -> Making:
        """For as many microbatches as show which rule is best."""
        many = min(self.pipeline.num_microbatches, (1 + FULL_AFTER) * len(self.room))
        return replace(self, pipeline=_of(self.pipeline, many))

    def fits(self, pipeline: PipelinePlan) -> bool:
        held = held_at_peak(Pattern.of(pipeline))
        return all(sum(each) <= room for each, room in zip(held, self.room, strict=True))

    def alike(self) -> list[str]:
        """Names that lay stages where they are, the preferred first."""
        places = self.pipeline.positions()
        shape = len(places), len(self.pipeline.stages)
        chunks = shape[1] // shape[0]
        return [
            name
            for name in by_preference()
            if name in self.names
            and (SCHEDULES[name].chunks == chunks or (SCHEDULES[name].any_chunks and chunks > 1))
            and SCHEDULES[name].placement(*shape) == places
        ]

    def shop(self, room: tuple[int, ...], *, split: bool) -> Shop:
        return Shop(
            stages=self.stages,
            borders=self.borders,
            positions=self.pipeline.positions(),
            num_microbatches=self.pipeline.num_microbatches,
            room=room,
            split=split,
            last=last_size(self.pipeline.samples, self.pipeline.microbatch),
        )


def _of(pipeline: PipelinePlan, many: int) -> PipelinePlan:
    """With so many microbatches, the last as small as it is."""
    fewer = pipeline.num_microbatches - many
    return replace(pipeline, samples=pipeline.samples - fewer * pipeline.microbatch)


def make(making: Making) -> PipelinePlan:
    """The pipeline with the order that takes least; itself where no other saves anything, or where
    nothing that may be taken fits."""
    best = making.pipeline
    if len(making.room) == 1:
        return best
    seconds = making.seconds(best) if making.fits(best) else inf
    splits = any(SCHEDULES[name].splits_backward for name in making.alike())
    if seconds * (1 - making.worth) <= least_s(making.shop(making.room, split=splits).tables()):
        return best
    for other in _orders(making):
        worth = WORTH if other.in_flight or other.lists else 0.0
        takes = making.seconds(other)
        if takes < seconds * (1 - worth):
            best, seconds = other, takes
    return best


def _orders(making: Making) -> Iterator[PipelinePlan]:
    """Those that fit, what says least first."""
    names = making.alike()
    plain = [replace(making.pipeline, schedule=name, in_flight=(), lists=()) for name in names]
    yield from filter(making.fits, plain)
    for each in plain:
        if SCHEDULES[each.schedule].deeper is not None and len(making.room) > 1:
            yield _deepened(making, each)
    if len(making.names) == 1:
        return
    for split in (False, True):
        alike = [name for name in names if SCHEDULES[name].splits_backward == split]
        if alike:
            lists = tuple(map(write, _searched(making, split=split).lists()))
            yield replace(making.pipeline, schedule=alike[0], in_flight=(), lists=lists)


def _deepened(making: Making, usual: PipelinePlan) -> PipelinePlan:
    """One more in flight before the border where that saves most, as long as it does.

    Begins with what there is room for, which may be less than the usual numbers.
    """
    many = usual.num_microbatches
    most = [min(many, room) for room in making.room]
    for place in range(len(most) - 1)[::-1]:  # none less than the next
        most[place + 1] = min(most[place + 1], *most[: place + 1])
    places = range(len(most))
    best = replace(usual, in_flight=tuple(min(most[p], len(most) - p) for p in places))
    seconds, tries = making.about(best), MOST_NUMBERS
    while tries > 0:
        found = []
        for border in places[1:]:
            counts = [min(n + (p < border), most[p]) for p, n in enumerate(best.in_flight)]
            more = replace(best, in_flight=tuple(counts))
            if more != best:
                found.append((making.about(more), counts, more))
        tries -= len(found)
        least = min(found, default=None, key=lambda each: each[:2])
        if least is None or least[0] >= seconds * (1 - WORTH):
            return best
        seconds, best = least[0], least[2]
    return best


def _searched(making: Making, *, split: bool) -> Board:
    """The best board of rules with all room or less of it, and of a beam."""
    many, positions = making.pipeline.num_microbatches, making.pipeline.positions()
    room = tuple(
        min(room, many * len(held)) for room, held in zip(making.room, positions, strict=True)
    )
    actions = many * len(making.stages) * (3 if split else 2)
    tables = making.shop(room, split=split).tables()
    few = making.shorter().shop(room, split=split).tables()
    ends = sorted((follow(few, rule).end, number) for number, rule in enumerate(RULES))
    rules = [RULES[number] for _, number in ends[:BEST_RULES]]
    ruled = [_narrowed(making, rule, tables, split=split) for rule in rules]
    searched = beam(tables, max(1, min(MOST_BOARDS, making.budget // actions)))
    return min([*ruled, searched], key=lambda board: board.end)


def _narrowed(making: Making, rule: Rule, tables: Tables, *, split: bool) -> Board:
    """What a rule makes with as much less room at some positions as it needs to go well."""
    best, room = follow(tables, rule), tables.room
    tries = making.budget // BEST_RULES // (tables.many * len(making.stages)) + 1
    left = _with_less(room, tables)
    while left and tries > 0:
        tries -= 1
        tried = left.pop()
        board = follow(making.shop(tried, split=split).tables(), rule)
        if board.end < best.end * (1 - WORTH):
            best, left = board, _with_less(tried, tables)
    return best


def _with_less(room: tuple[int, ...], tables: Tables) -> list[tuple[int, ...]]:
    """One position with less room, the last tuple first: the first position with one less."""
    return [
        (*room[:place], less, *room[place + 1 :])
        for place, held in reversed(list(enumerate(tables.positions)))
        for less in range(len(held), room[place])
    ]

"""What lies next to the best plans of many chips, which the effort does not reach: a pipeline with
another schedule, its kinds in another order or in a few meshes more or less, and two pipelines as
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, permutations, takewhile
from math import inf
from typing import NamedTuple

from weft.cluster.view import ChipPool
from weft.plan.plan import ScheduleName
from weft.planner.problem import Options
from weft.planner.search.choice import (
    Line,
    Section,
    Timed,
    inner_of,
    mesh_axes,
    num_ranks,
    samples_at_once,
)
from weft.planner.search.group import Group, Kept
from weft.planner.search.sharing import balanced, evened, every_one, longest

STEPS = 2
"""Times that shares are balanced anew for what is looked at."""
WORTH = 1 - 1e-4
"""Times the best step, below which a plan is faster."""
MESHES = 2
"""Meshes more or less that a kind is cut into."""
NEARLY = 1.1
"""Times the best step, up to which a pipeline may take before shares are balanced."""


class Place(NamedTuple):
    """Where plans are looked for."""

    groups_of: Callable[[Sequence[Line]], Sequence[Group]]
    """Of pipelines side by side."""
    allows: Callable[[Sequence[Line]], bool]
    """Options leave them open."""
    schedules: Sequence[ScheduleName]
    pools: Sequence[ChipPool]
    is_over: Callable[[], bool]
    """The effort was spent."""


def fastest_nearby(begun: Sequence[Line], place: Place) -> list[Timed]:
    """From a plan to a faster one next to it, until there is none; empty where the plan itself has
    no room as its meshes balance."""
    look = _Look(place, Kept(begun[0].apart, begun[0].sections[0].zero))
    best = look.balanced(begun, inf)
    while better := look.next_to(best):
        best = better
    return look.whole(best)


class _Look:
    """At plans that keep what they hold alike."""

    def __init__(self, place: Place, kept: Kept) -> None:
        self.place, self.kept = place, kept
        self._brief = cache(partial(self._timed, brief=True))

    def _timed(
        self, line: Line, group: Group, limit: float, *, brief: bool = False
    ) -> Timed | None:
        if line.samples < line.micro:
            return None
        kept = self.kept if group.costs.num_pipelines > 1 else None
        return group.of(_open(line), limit, kept, brief=brief)

    def next_to(self, best: Sequence[Timed]) -> list[Timed]:
        """The first that is faster; none where none is, or the effort was spent."""
        place, best_s = self.place, longest(best)
        near = neighbours([each.line for each in best], place.schedules, place.pools)
        allowed = takewhile(lambda _: not place.is_over(), filter(place.allows, near))
        every = (self.balanced(lines, NEARLY * best_s) for lines in allowed)
        return next((each for each in every if longest(each) < WORTH * best_s), [])

    def balanced(self, lines: Sequence[Line], limit: float) -> list[Timed]:
        """With the shares that suit them; none where one has none, or takes ``limit``."""
        best, groups = list[Timed](), self.place.groups_of(lines)
        for _ in range(STEPS + 1):
            both = zip(lines, groups, strict=True)
            each = every_one([self._brief(line, group, limit) for line, group in both])
            if longest(each) >= longest(best):
                break
            best, shares = each, balanced(each)
            lines = [replace(t.line, samples=n) for t, n in zip(each, shares, strict=True)]
            if any(line.samples < line.micro for line in lines):
                break
        return best

    def whole(self, best: Sequence[Timed]) -> list[Timed]:
        """With more looked at than where meshes balance, and shares that no move betters."""
        lines = [each.line for each in best]
        groups = self.place.groups_of(lines)
        each = [self._timed(*both, inf) for both in zip(lines, groups, strict=True)]
        found = every_one(each) or list(best)
        return evened(groups, found, [one.line.samples for one in found]) or found


def is_open(line: Line, options: Options) -> bool:
    """Options leave its depth and its microbatch open, as frames have it."""
    deep = line.num_meshes > (options.max_stages or line.num_meshes)
    most = samples_at_once(line.sections, line.micro)
    return not deep and (options.micros is None or most in options.micros)


def neighbours(
    lines: Sequence[Line], schedules: Sequence[ScheduleName], pools: Sequence[ChipPool]
) -> Iterator[list[Line]]:
    """Those that differ in one thing; what takes least to look at first."""
    for number, line in enumerate(lines):
        others = [replace(line, schedule=each) for each in schedules if each != line.schedule]
        if line.num_meshes > 1:
            yield from (_with(lines, number, other) for other in others)
        for one, other in combinations(range(len(line.sections)), 2):
            order = list(line.sections)
            order[one], order[other] = order[other], order[one]
            yield _with(lines, number, replace(line, sections=tuple(order)))
    for first, second in permutations(lines, 2):
        rest = [line for line in lines if line not in (first, second)]
        yield from ([*rest, both] for both in _as_one(first, second))
    for number in range(len(lines)):
        yield from (_with(lines, number, other) for other in _shaped(lines, number, pools))


def _shaped(lines: Sequence[Line], number: int, pools: Sequence[ChipPool]) -> Iterator[Line]:
    """With a mesh or two more or less of a kind, on all of its chips that others leave."""
    line = lines[number]
    micro = line.micro // max(section.ways for section in line.sections)
    for place, section in enumerate(line.sections):
        inner = inner_of(section.axes)
        used = sum(s.num_chips for each in lines for s in each.sections if s.pool == section.pool)
        chips = pools[section.pool].num_chips - used + section.num_chips
        for meshes in range(max(1, section.meshes - MESHES), section.meshes + MESHES + 1):
            ways = chips // (num_ranks(inner) * meshes)
            other = Section(section.pool, mesh_axes(max(ways, 1), inner), meshes, section.recompute)
            if ways and other != section:
                sections = (*line.sections[:place], other, *line.sections[place + 1 :])
                yield replace(
                    line, sections=sections, micro=max(s.ways for s in sections) * max(micro, 1)
                )


def _as_one(first: Line, second: Line) -> Iterator[Line]:
    """Both one behind the other, in meshes as wide as the first one's."""
    if {s.pool for s in first.sections} & {s.pool for s in second.sections}:
        return
    samples = first.samples + second.samples
    for ways in sorted({section.ways for section in first.sections}):
        more = tuple(_as_wide(section, ways) for section in second.sections)
        for sections in ((*first.sections, *more), (*more, *first.sections)):
            yield replace(first, sections=sections, samples=samples)


def _as_wide(section: Section, ways: int) -> Section:
    """Its chips in other meshes."""
    inner = inner_of(section.axes)
    groups = section.num_chips // num_ranks(inner)
    ways = min(ways, groups)
    return Section(section.pool, mesh_axes(ways, inner), groups // ways, section.recompute)


def _with(lines: Sequence[Line], number: int, line: Line) -> list[Line]:
    return [*lines[:number], line, *lines[number + 1 :]]


def _open(line: Line) -> Line:
    """All that a group chooses left open."""
    sections = tuple(section._replace(zero=0, shard_ways=0) for section in line.sections)
    return replace(line, sections=sections, layers=(), in_flight=(), apart="")

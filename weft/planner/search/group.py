"""The best pipeline through some kinds of chip: branch and bound, most promising frames first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from heapq import heapify, heappop, heappush
from itertools import chain, permutations, product
from math import factorial, inf, prod
from operator import attrgetter
from typing import NamedTuple

from weft.cost.times import StageTimes
from weft.plan.plan import ScheduleName, ZeroLevel
from weft.planner.search.choice import Apart, Line, Section, Timed
from weft.planner.search.costs import Held
from weft.planner.search.course import Course, Places, course_of, places_of
from weft.planner.search.flights import deeper
from weft.planner.search.found import Pruned
from weft.planner.search.frames import UNMADE, Frame, Space
from weft.planner.search.meshes import Meshes
from weft.planner.search.route import Route
from weft.planner.search.splits import explore, too_slow
from weft.planner.search.watch import Watch
from weft.schedules.known import Pattern


@dataclass(slots=True)
class Ledger:
    """What became of the candidates, and how much work is left to do."""

    pruned: Pruned
    considered: int = 0
    simulated: int = 0
    effort: int = 0
    """Actions made and played; ends the search where a space is too large."""
    best_s: float = inf
    """The least step that was found."""
    watch: Watch = field(default_factory=Watch)
    is_cut_short: bool = False
    """Something was left out because nobody waited for more."""
    patterns: set[Pattern] = field(default_factory=set)
    """Schedules that were made."""

    def is_through(self, enough: float = inf) -> bool:
        """So much effort was spent; or something was found, and nobody waits for more."""
        if self.best_s < inf and self.watch.is_over:
            self.is_cut_short = True
        return self.is_cut_short or self.effort > enough

    def goes_on(self) -> bool:
        """Whoever waits does so for more, and is told."""
        if self.is_through():
            return False
        self.tell()
        return True

    def tell(self) -> None:
        """Whoever waits."""
        self.watch.tell(self.considered, self.best_s)

    def count(self, route: Route, played: int) -> None:
        """Splits of a route were played, and its schedules made where they were not known."""
        made = not self.patterns.issuperset(route.played)
        self.effort += (MAKING * made + played) * route.actions
        self.patterns.update(route.played)

    def leave(self, many: int, why: str) -> None:
        """So many candidates are not looked at, for that the effort was spent."""
        self.considered += many
        self.pruned.add("limit", why, many)


LOOKING = 100
"""Actions that could be played in the time in which a mesh is bounded."""
MAKING = 15
"""Actions that could be played in the time in which one is made."""
APART = 4
"""Times less effort for pipelines side by side that are domains, where those that are not were
looked at."""
MOST_COURSES = 1 << 10
"""That a group keeps: what is kept otherwise is looked at on the same ones."""
LITTLE = 2
"""Of many chips, a frame that takes more than the effort for a group divided by this comes last."""
UNFIT = 8
"""Times as much effort while nothing that was looked at fits."""
UNCUT = 2
"""Frames of every group that are explored, with the first schedule, whatever else is known: where
less than the best is of interest too."""
SLOWER_LINES = 1.2
"""Times the best of a frame's pipelines, up to which its others are of interest."""
BEATEN = "ZeRO: another level takes no longer and needs less memory"
NO_FASTER = "domains: with others it takes no longer and needs no more memory"

_SECONDS = attrgetter("seconds")
SLOWER_TO_SHOW = 2.0
"""Pipelines on one kind of chip are kept up to so many times the best step."""
NEAR = 0.75
"""Shares that are no smaller than so much of another are looked for among its frames; larger ones
may have larger microbatches."""


@dataclass(frozen=True, slots=True)
class Known:
    """Frames, and what they were made for."""

    samples: int
    per_sample_s: float
    """Slower ones were left out."""
    frames: list[Frame]
    refined: Callable[[Frame], Frame]


class Look(NamedTuple):
    """One that a group takes at its frames."""

    first: bool
    """With the schedule that is quickly made; else with the others."""
    brief: bool = False
    """Only at the split that balances the meshes best, to see which frames look best then."""


WHOLE = Look(first=True), Look(first=False)
BRIEF_FIRST = tuple(look._replace(brief=brief) for look in WHOLE for brief in (True, False))


@dataclass(slots=True)
class Seen:
    """A frame, and what was found of it."""

    frame: Frame
    seconds: float = inf
    """The least of its steps."""
    found: dict[bool, list[Timed]] = field(default_factory=dict)
    """With the first schedule, and with others."""

    def add(self, explored: list[Timed], look: Look) -> None:
        """What a look found instead of what one before it did, which is kept where it is faster."""
        before = self.found.get(look.first, [])
        least, known = (min(map(_SECONDS, each), default=inf) for each in (explored, before))
        self.found[look.first] = explored if least <= known else before + explored
        self.seconds = min(self.seconds, least * self.frame.stretch)


class Asked(NamedTuple):
    """What all looks of a group are told."""

    samples: int
    kept: Kept | None
    uncut: int
    nearly: float


class Kept(NamedTuple):
    """How all pipelines side by side keep what they hold."""

    apart: Apart
    level: ZeroLevel
    """Of ZeRO."""


class Group:
    """Pipelines through some pools, one of ``costs.num_pipelines`` side by side."""

    def __init__(self, meshes: Meshes, pools: tuple[int, ...], ledger: Ledger) -> None:
        self.meshes, self.costs = meshes, meshes.costs
        self.options = self.costs.options
        self.pools, self.ledger = pools, ledger
        self._kept: dict[object, list[ZeroLevel]] = {}
        self._quicker: dict[tuple[Section, Section], bool] = {}
        self._known: Known | None = None
        keep = lru_cache(maxsize=MOST_COURSES)
        places = keep(partial(Places, self.costs))
        self._course: Callable[[Line], Course] = keep(
            lambda line: Course(places(places_of(line)), line)
        )
        self.words = " + ".join(self.costs.pools[pool].chip.name for pool in pools)
        self._too_many = f"{self.words}: less promising than the many that were looked at"
        self.found: list[Timed] = []
        """The best of each frame and schedule that was simulated."""
        self._fits = False
        """Something did, of what was looked at, or was too slow to be asked."""

    def best(
        self,
        samples: int,
        cutoff: float,
        kept: Kept | None = None,
        *,
        effort: int | None = None,
        uncut: int = UNCUT,
        nearly: float = 1.0,
        looks: Sequence[Look] = WHOLE,
    ) -> Timed | None:
        """The fastest pipeline for so many samples; where a step takes ``cutoff`` or more, the
        fastest of the few that are looked at whatever is known.

        Args:
            cutoff: Counts that the last of many ranks is late.
            kept: How all stages keep what they hold; None leaves it open.
            uncut: Frames that are looked at whatever is known.
            nearly: Those that take up to so many times as long are ``found`` too.
            looks: In this order; after each, what took least comes first.
        """
        frames = self._frames(samples, nearly * cutoff, shown=uncut > 0)
        asked, every = Asked(samples, kept, uncut, nearly), [Seen(frame) for frame in frames]
        for look in looks:
            enough = self._enough(kept, effort or self.options.effort)
            cutoff = self._look_at(every, look, asked, cutoff, enough)
            every.sort(key=_SECONDS)
        found = [[t for some in seen.found.values() for t in some] for seen in every]
        self.found += chain(*found)
        return min(found[0], key=_SECONDS) if found and found[0] else None

    def _look_at(
        self,
        every: Sequence[Seen],
        look: Look,
        asked: Asked,
        cutoff: float,
        enough: Callable[[], int],
    ) -> float:
        """Frames, the first first; returns the least that a step takes by then."""
        slow, left, samples, looked = list[Frame](), list[Frame](), asked.samples, 0
        turns = [(s.seconds, self._guess(s.frame, samples), n) for n, s in enumerate(every)]
        heapify(turns)
        while turns:
            *_, number = heappop(turns)
            seen = every[number]
            self.ledger.tell()
            frame, free = seen.frame, look.first and looked < asked.uncut
            schedules = self._schedules(frame, first=look.first)
            if not free and frame.is_slow(samples, schedules, asked.nearly * cutoff):
                slow.append(frame)
            elif self.ledger.is_through(enough()):
                left.append(frame)
            elif frame.rough:
                assert self._known is not None, frame
                seen.frame = self._known.refined(frame)
                heappush(turns, (seen.seconds, self._guess(seen.frame, samples), number))
            else:
                looked += 1
                limit = inf if free else asked.nearly * cutoff / frame.stretch
                with self._uncounted() if look.brief else nullcontext():
                    lines = self._lines(frame, samples, schedules, asked.kept)
                    explored = self._explored(lines, limit, asked.kept, enough, brief=look.brief)
                seen.add(explored, look)
                cutoff = min(cutoff, seen.seconds)
        if not look.brief:
            self._rule_out(slow, samples, cutoff, first=look.first)
            children = self._children(left, first=look.first)
            self.ledger.pruned.add("limit", self._too_many, children)
        return cutoff

    def of(
        self, line: Line, limit: float, kept: Kept | None, *, brief: bool = False
    ) -> Timed | None:
        """A pipeline whose order, schedule and samples are decided; none where it does not fit,
        takes ``limit`` or more, or cannot be ``kept`` so. ``brief``: as of a ``Look``."""
        for section in line.sections:
            allowed = self.options.any_shape or self.meshes.allows(section, line.micro)
            if not (allowed and self.meshes.fills(section)):
                return None
        with self._uncounted():
            return self._best_levels(line, limit, kept, brief=brief)

    def again(self, line: Line, samples: int) -> Timed | None:
        """A pipeline that was found, with other samples; None where it has less than a microbatch,
        or not the room."""
        if samples < line.micro:
            return None
        many = -(-samples // line.micro)
        held = tuple(min(number, many) for number in line.in_flight)
        route = self._route(replace(line, samples=samples, in_flight=held))
        if any(layers > room for layers, room in zip(line.layers, route.room, strict=True)):
            return None
        self.ledger.count(route, 1)
        return route.timed(line.layers)

    def _route(self, line: Line) -> Route:
        return Route(self.costs, line, self._course(course_of(line)))

    def _enough(self, kept: Kept | None, effort: int) -> Callable[[], int]:
        """Up to which effort the first schedule is looked at from now on, or the others: longer
        while nothing fits."""
        apart = APART if kept is not None and kept.apart else 1
        begin, own = self.ledger.effort, self._part_of(effort) // apart
        return lambda: begin + own * (1 if self._fits else UNFIT)

    def spent(self, kept: Kept) -> Callable[[], bool]:
        """Whether since now as much effort was spent as one search of several pipelines may."""
        enough = self.ledger.effort + self.options.effort // (APART if kept.apart else 1)
        return lambda: self.ledger.is_through(enough)

    def _part_of(self, effort: int) -> int:
        """For the first schedule, or for the others."""
        return effort // (2 * len(self.pools))

    def may_keep(self, kept: Kept) -> bool:
        """Some of what was looked at could be kept so, and is not better kept otherwise."""
        return self._known is None or any(self._may_keep(f, kept) for f in self._known.frames)

    def _may_keep(self, frame: Frame, kept: Kept) -> bool:
        sections = self.costs.apart(frame.sections).get(kept.apart, ())
        return bool(sections) and all(kept.level in self._useful(each) for each in sections)

    def _frames(self, samples: int, cutoff: float, *, shown: bool) -> list[Frame]:
        """Those of a like share will do. ``shown``: so are slower ones."""
        known = self._known
        if (
            known is None
            or not NEAR * known.samples <= samples <= known.samples
            or cutoff / samples > known.per_sample_s
        ):
            fewest = samples if self.costs.num_pipelines == 1 else round(NEAR * samples)
            space = Space(self.meshes, samples, fewest)
            slowest = cutoff / fewest
            if len(self.pools) == 1:
                slowest *= SLOWER_TO_SHOW if shown else 1
                frames = list(space.alone(self.pools[0], slowest))
            else:
                frames = space.mixed(self.pools, slowest)
            for kind, words in UNMADE.items():
                self.ledger.considered += space.unmade[kind]
                self.ledger.pruned.add(kind, f"{self.words}: {words}", space.unmade[kind])
            if len(self.pools) > 1 and not self.meshes.few:
                much = self._part_of(self.options.effort) // LITTLE
                frames.sort(key=lambda frame: self._effort(frame, samples) > much)
            self._known = known = Known(samples, slowest, frames, cache(space.refined))
        frames = [frame for frame in known.frames if frame.micro <= samples]
        self.ledger.considered += sum(self._children(frames, first=f) for f in (True, False))
        return frames

    def _effort(self, frame: Frame, samples: int) -> int:
        """About how much a frame takes with one schedule."""
        microbatches = -(-samples // frame.micro)
        return 2 * MAKING * frame.num_meshes * microbatches * factorial(len(frame.sections))

    def _guess(self, frame: Frame, samples: int) -> float:
        """About what a step takes: only the order in which frames are looked at goes by it, where
        these are not in one."""
        if len(self.pools) > 1:
            return 0.0
        microbatches = -(-samples // frame.micro)
        idle = (frame.num_meshes - 1) / microbatches / 2
        return frame.late_s * (1 + idle)

    def _lines(
        self, frame: Frame, samples: int, schedules: Sequence[ScheduleName], kept: Kept | None
    ) -> list[Line]:
        """A frame's pipelines, in each order and with each schedule; none where a frame cannot, or
        had better not, be ``kept`` so."""
        if kept is not None and not self._may_keep(frame, kept):
            self.ledger.pruned.add("slower", BEATEN, frame.ways * len(schedules))
            return []
        orders = permutations(frame.sections)
        return [Line(o, frame.micro, s, (), samples) for o, s in product(orders, schedules)]

    def _explored(
        self,
        lines: Sequence[Line],
        limit: float,
        kept: Kept | None,
        enough: Callable[[], int],
        *,
        brief: bool,
    ) -> list[Timed]:
        """The best of each of a frame's lines that takes less than ``limit`` and is not much slower
        than the others: of the first, and of others until there was ``enough`` effort, for those of
        many meshes take long."""
        found: list[Timed] = []
        for number, line in enumerate(lines):
            if number and self.ledger.is_through(enough()):
                each = self._number_of_ways(line)
                self.ledger.pruned.add("limit", self._too_many, each * (len(lines) - number))
                break
            best = self._best_levels(line, limit, kept, brief=brief)
            if best is not None:
                limit = min(limit, SLOWER_LINES * best.seconds)
                found.append(best)
        return found

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Only the effort counts: all that is looked at is looked at again, or has its reason."""
        whole = self.ledger
        self.ledger = replace(whole, pruned=Pruned())
        try:
            yield
        finally:
            whole.effort = self.ledger.effort
            self.ledger = whole

    def _best_levels(
        self, line: Line, limit: float, kept: Kept | None, *, brief: bool
    ) -> Timed | None:
        """The best choice of domains, ZeRO levels, numbers in flight and layers for an order and a
        schedule."""
        route, pruned = self._route(line), self.ledger.pruned
        at_best = f"at best more than {limit:.4g} s" if limit < inf else "more stages than layers"
        too_long = f"{self.words}, {line.schedule}: {at_best}"
        self.ledger.effort += LOOKING * route.num_meshes
        numbers = [n for n in ((), *deeper(route)) if not too_slow(route.with_numbers(n), limit)]
        if not numbers:
            self._fits = True
            pruned.add("bound", too_long, self._number_of_ways(line))
            return None
        useful = list(self._worth_trying(line, kept))
        self.ledger.effort += LOOKING * len(useful) * route.num_meshes
        self.ledger.considered += len(useful) * (len(numbers) - 1)
        best: Timed | None = None
        for each, held in product(useful, numbers):
            route = replace(route, line=replace(each, in_flight=held))
            least = limit if best is None else min(limit, best.seconds)
            explored = explore(route, least, brief=brief)
            self.ledger.count(route, explored.played)
            self._fits |= explored.fits
            if explored.best is None:
                if explored.fits:
                    pruned.add("bound", too_long)
                else:
                    pruned.add("memory", partial(self._shortage, route))
                continue
            self.ledger.simulated += 1
            if best is None or explored.best.seconds < best.seconds:
                best = explored.best
        return best

    def _worth_trying(self, line: Line, kept: Kept | None) -> Iterator[Line]:
        """It with each choice of domains and ZeRO levels that is not ruled out."""
        for apart, pairs in self._ways(line):
            if kept is not None and (apart != kept.apart or {z for _, z in pairs} != {kept.level}):
                words = "domains or levels of ZeRO that pipelines do not share"
                self.ledger.pruned.add("shape", words)
            elif any(level not in self._useful(section) for section, level in pairs):
                self.ledger.pruned.add("slower", BEATEN)
            elif kept is None and self._beaten(apart, pairs):
                self.ledger.pruned.add("slower", NO_FASTER)
            else:
                chosen = tuple(section._replace(zero=level) for section, level in pairs)
                yield replace(line, sections=chosen, apart=apart)

    def _ways(self, line: Line) -> Iterator[tuple[Apart, list[tuple[Section, ZeroLevel]]]]:
        """Every choice of domains, with a level of ZeRO for each section."""
        for apart, sections in self.costs.apart(line.sections).items():
            for levels in product(*map(self.costs.zero_levels, sections)):
                yield apart, list(zip(sections, levels, strict=True))

    def _number_of_ways(self, line: Line) -> int:
        every = self.costs.apart(line.sections).values()
        return sum(prod(len(self.costs.zero_levels(s)) for s in sections) for sections in every)

    def _beaten(self, apart: Apart, pairs: Sequence[tuple[Section, ZeroLevel]]) -> bool:
        """Domains that make nothing faster; or none where domains do, and need no more memory."""
        if not apart and any(level for _, level in pairs):
            return False
        whole = tuple(section._replace(shard_ways=0) for section, _ in pairs)
        others = self.costs.apart(whole)
        other = others.get("" if apart else "nodes", ())
        both = [
            (theirs._replace(zero=level), section._replace(zero=level))
            for theirs, (section, level) in zip(other, pairs, strict=False)
        ]
        return bool(both) and all(self._takes_no_longer(*each) for each in both)

    def _children(self, frames: Sequence[Frame], *, first: bool) -> int:
        """Candidates in frames: orders, schedules, levels of ZeRO."""
        many = 1 if first else len(self.options.schedules) - 1
        alone = 1 if first else 0
        return sum(frame.ways * (many if frame.num_meshes > 1 else alone) for frame in frames)

    def _schedules(self, frame: Frame, *, first: bool) -> tuple[ScheduleName, ...]:
        """The first, which is quickly made; and the others."""
        every = self.options.schedules if frame.num_meshes > 1 else ("1f1b",)
        return every[:1] if first else every[1:]

    def _useful(self, section: Section) -> list[ZeroLevel]:
        """Levels that no other one beats in time and in memory."""
        key = section.pool, section.axes, section.shard_ways
        if key not in self._kept:
            every = self.costs.zero_levels(section)
            self._kept[key] = [
                level
                for level in every
                if level == 3
                or not any(
                    level < other < 3 and self._no_slower(section, other, level) for other in every
                )
            ]
        return self._kept[key]

    def _no_slower(self, section: Section, other: ZeroLevel, level: ZeroLevel) -> bool:
        alone = self.costs.num_pipelines == 1 or section.shard_ways
        if other == 2 and alone:  # it reduces gradients in each backward
            return False
        pair = (section._replace(recompute="off", zero=zero) for zero in (other, level))
        return all(first.update_s <= second.update_s for first, second in self._both(*pair))

    def _takes_no_longer(self, one: Section, other: Section) -> bool:
        """Whatever layers and samples there are."""
        key = one._replace(meshes=1, recompute="off"), other._replace(meshes=1, recompute="off")
        if key not in self._quicker:
            self._quicker[key] = all(
                first.forward_s <= second.forward_s
                and first.input_grad_s <= second.input_grad_s
                and first.weight_grad_s <= second.weight_grad_s
                and first.update_s <= second.update_s
                for first, second in self._both(*key)
            )
        return self._quicker[key]

    def _both(self, one: Section, other: Section) -> Iterator[tuple[StageTimes, StageTimes]]:
        """Times of one layer, and of the whole model, on each."""
        node = self.costs.pools[one.pool].chips_per_node
        ranks = [
            self.costs.rank(each.pool, node, self.costs.choice(each, 1)) for each in (one, other)
        ]
        for held in Held(1, False, False), Held(self.costs.num_layers, True, True):
            first, second = (self.costs.times(rank, held) for rank in ranks)
            yield first, second

    def _rule_out(
        self, frames: Sequence[Frame], samples: int, cutoff: float, *, first: bool
    ) -> None:
        """Their bounds say so."""
        if frames:
            late = [max(cutoff, samples * frame.late_s) for frame in frames]
            words = f"{self.words}: at best {min(late):.4g} s, another takes {cutoff:.4g} s"
            number = self._children(frames, first=first)
            self.ledger.pruned.add("bound", words, number, min(late), max(late))

    def _shortage(self, route: Route) -> str:
        """How much memory a mesh lacks, that with the least room."""
        mesh = min(range(route.num_meshes), key=lambda m: route.room[m] - route.least[m])
        pool = route.ranks[mesh].pool
        layers = max(route.least[mesh], -(-self.costs.num_layers // route.num_meshes))
        gib, budget = (num / 2**30 for num in (route.bytes(mesh, layers), self.costs.budgets[pool]))
        where = f"mesh {mesh} on {self.costs.pools[pool].chip.name}"
        return f"{self.words}, {route.line.schedule}: {where} needs {gib:.1f} GiB of {budget:.1f}"

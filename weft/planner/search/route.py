"""One pipeline whose layers are still open: how many each mesh may take, and what a split costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import inf

from weft.cost.times import BorderTimes, StageTimes
from weft.planner.search.bounds import Bounds, Flow, bounds_of, least_once
from weft.planner.search.choice import Line, Timed, stage_layers
from weft.planner.search.costs import Costs, Held, Rank
from weft.planner.search.course import Course, Places, course_of, places_of
from weft.schedules.border_memory import borders_at_peak
from weft.schedules.known import Pattern, held_at_peak
from weft.schedules.registry import SCHEDULES
from weft.simulate.tape import seconds_each, tape_of

Peak = tuple[tuple[int, ...], float]
"""Of a mesh: microbatches of its stages, and tensors at its borders."""
FULL_AFTER = 3
"""Microbatches for each mesh, after which the next for each is taken for all that follow."""
REPEATING = ("1f1b", "zb-h1")
"""Schedules that repeat themselves after fewer microbatches than meshes, which is looked for."""
PLAYED_WHOLE = 1500
"""Actions up to which a step is played to its end: more would leave less effort for others."""
TOGETHER = 12
"""Splits from which on they are played all at once."""
FASTER = 10
"""Times as many are then played in a time, beside what ``TOGETHER`` take by themselves."""


@dataclass(frozen=True)
class Route:
    """A pipeline on a cluster."""

    costs: Costs
    line: Line
    """Its layers are not looked at."""
    known: Course | None = None
    """Its course, where another was on it."""

    def with_numbers(self, in_flight: tuple[int, ...]) -> Route:
        """With so many microbatches in flight."""
        same = in_flight == self.line.in_flight
        return self if same else replace(self, line=replace(self.line, in_flight=in_flight))

    @cached_property
    def course(self) -> Course:
        if self.known:
            return self.known
        course = course_of(self.line)
        return Course(Places(self.costs, places_of(course)), course)

    @property
    def num_meshes(self) -> int:
        return self.course.num_meshes

    @property
    def positions(self) -> list[tuple[int, ...]]:
        """The stages of each mesh."""
        return self.course.positions

    @property
    def least(self) -> list[int]:
        """The fewest layers of each mesh."""
        return self.course.least

    @property
    def borders(self) -> list[BorderTimes]:
        """Between stages ``s`` and ``s + 1``."""
        return self.course.borders

    @property
    def flow(self) -> Flow:
        """What bounds know of it, apart from how many layers its meshes have."""
        return self.course.flow(self.line)

    @property
    def bounds(self) -> Bounds:
        """Of a step, where its meshes have the fewest layers."""
        return self.course.bounds(self.line.samples, self.line.in_flight)

    @cached_property
    def pattern(self) -> Pattern:
        """Of its schedule."""
        line = self.line
        meshes, stages = self.num_meshes, self.course.num_stages
        many = -(-line.samples // line.micro)
        return Pattern(line.schedule, meshes, stages, many, line.in_flight)

    @cached_property
    def peaks(self) -> list[Peak]:
        """Of each mesh."""
        borders = borders_at_peak(self.pattern, self.course.largest_message)
        return list(zip(held_at_peak(self.pattern), borders, strict=True))

    @cached_property
    def ranks(self) -> list[Rank]:
        """Of each mesh."""
        found, places = [], self.course.places
        per_node = [number for _, number in places.sections]
        for section, number in zip(self.line.sections, per_node, strict=True):
            choice = self.costs.choice(section, places.most(section))
            found += [self.costs.rank(section.pool, number, choice)] * section.meshes
        return found

    def timed(self, layers: tuple[int, ...]) -> Timed:
        """The pipeline with these layers on its meshes."""
        return Timed(self.seconds(layers), replace(self.line, layers=layers))

    def seconds(self, layers: Sequence[int]) -> float:
        """A step of the pipeline and what is done once, as ``time_of_plan`` says it, without the
        sum of totals over all ranks."""
        return self.seconds_of([tuple(layers)])[0]

    def plays(self, splits: int) -> int:
        """Plays that take as long as ``seconds_of`` so many."""
        return splits if splits < TOGETHER else min(splits, TOGETHER + splits // FASTER)

    def seconds_of(self, splits: Sequence[tuple[int, ...]]) -> list[float]:
        """``seconds`` of each."""
        every = [self._times(layers) for layers in splits]
        parts = zip(*(self._played(part, every) for part in self.played), strict=True)
        return [
            self._until_last_backward(times, ends) + self._once(times)
            for times, ends in zip(every, parts, strict=True)
        ]

    def _played(
        self, part: Pattern, every: Sequence[Sequence[StageTimes]]
    ) -> list[tuple[float, list[float]]]:
        """When each play of it has ended, and the first stage's backwards."""
        tape, around = tape_of(part), (self.borders, self.course.last_size)
        if len(every) < TOGETHER:
            return [tape.end_and_backs(times, *around) for times in every]
        return tape.ends_and_backs(every, *around)

    def _times(self, layers: Sequence[int]) -> list[StageTimes]:
        """Of all stages."""
        counts = stage_layers(self.line.schedule, tuple(layers))
        return [self._of_stage(*each) for each in enumerate(counts)]

    @cached_property
    def _of_stage(self) -> Callable[[int, int], StageTimes]:
        """Of a stage with so many layers; with a smaller last microbatch where there is one."""
        costs, (micro, last) = self.costs, self.course.sizes
        rank_of, end = self._by_stage(self.ranks), self.course.num_stages - 1

        def found(stage: int, layers: int) -> StageTimes:  # knows no route: that would be a ring
            rank, held = rank_of[stage], Held(layers, stage == 0, stage == end)
            if last == micro:
                return costs.times(rank, held)
            return costs.ragged(rank, rank.most(last), held)

        return cache(found)

    def _by_stage(self, ranks: Sequence[Rank]) -> dict[int, Rank]:
        both = zip(ranks, self.positions, strict=True)
        return {stage: rank for rank, stages in both for stage in stages}

    def _once(self, times: Sequence[StageTimes]) -> float:
        """What is done once a step."""
        every = (sum(times[stage].update_s for stage in stages) for stages in self.positions)
        return max(0.0, *every)

    @property
    def actions(self) -> int:
        """Of one play."""
        return self._actions(self.played[-1].num_microbatches)

    @cached_property
    def played(self) -> tuple[Pattern, ...]:
        """What is played to time a step: all of it, or what shows how a long one grows."""
        many, meshes = self.pattern.num_microbatches, self.num_meshes
        repeats = self.line.schedule in REPEATING
        full = (repeats + FULL_AFTER) * self.pattern.together
        full += many % meshes if self.line.schedule == "interleaved" else 0
        if many <= full or self._actions(many) <= PLAYED_WHOLE:
            return (self.pattern,)
        numbers = (full,) if repeats else (full - meshes, full)
        return tuple(replace(self.pattern, num_microbatches=n) for n in numbers)

    def _actions(self, microbatches: int) -> int:
        kinds = 3 if SCHEDULES[self.line.schedule].splits_backward else 2
        return kinds * self.pattern.num_stages * microbatches

    def _until_last_backward(
        self, times: Sequence[StageTimes], parts: Sequence[tuple[float, list[float]]]
    ) -> float:
        """A long step grows with its microbatches, and no less than its busiest mesh or border.

        ``parts``: of what was ``played``, as ``_played`` has it.
        """
        last, (end, backs) = self.played[-1], parts[-1]
        more = self.pattern.num_microbatches - last.num_microbatches
        if not more:
            return end
        if len(parts) == 1:
            each = seconds_each(last, backs)
        else:
            each = (end - parts[0][0]) / self.num_meshes
        busy = max(
            sum(times[s].of("F") + times[s].of("B") for s in held) for held in self.positions
        )
        return end + more * max(each, busy, self.course.carrying)

    def bytes(self, mesh: int, layers: int) -> float:
        """Memory of one rank of a mesh that holds so many layers; without end where its host has
        no room for what waits there."""
        return self._bytes(mesh, self.peaks[mesh], layers)

    def _bytes(self, mesh: int, peak: Peak, layers: int) -> float:
        state = working = buffers = runtime = on_host = 0.0
        held, borders = peak
        rank, chunks = self.ranks[mesh], len(held)
        for number, (stage, count) in enumerate(zip(self.positions[mesh], held, strict=True)):
            share = (layers + chunks - 1 - number) // chunks
            part = self.costs.bytes(rank, self._held(stage, share))
            state += part.state + count * part.kept
            at_borders = part.buffers + borders * part.border
            working, buffers = max(working, part.working), max(buffers, at_borders)
            runtime = part.runtime
            on_host += part.on_host + count * part.away
        if on_host > self.costs.on_hosts[rank.pool]:
            return inf
        return state + working + buffers + runtime

    @cached_property
    def room(self) -> list[int]:
        """The most layers that each mesh has memory for; -1 where not even none fit."""
        return self._room(self.peaks)

    @cached_property
    def roomy(self) -> list[int]:
        """Likewise if nothing were held at borders, which takes long to count: no less."""
        return self._room([(held, 0.0) for held in held_at_peak(self.pattern)])

    def _room(self, peaks: Sequence[Peak]) -> list[int]:
        most, rooms = self.costs.num_layers, self.costs.rooms
        result = []
        for mesh, peak in enumerate(peaks):
            rank = self.ranks[mesh]
            key = rank, peak, self.course.ends[mesh]
            if key not in rooms:
                needed = partial(self._bytes, mesh, peak)
                rooms[key] = most_for(needed, self.costs.budgets[rank.pool], most)
            result.append(rooms[key])
        return result

    def most_within(self, seconds: float, room: Sequence[int]) -> list[int]:
        """The most layers of each mesh, of those that it has room for, with which a step may take
        no more, without what is done once.

        What the others cannot hold a mesh must, and that delays those behind it: so twice.
        """
        total = self.costs.num_layers
        least, most, bounds = self.least, list(room), self.bounds
        for again in (True, False):
            most = [min(layers, bounds.most(mesh, seconds)) for mesh, layers in enumerate(room)]
            spare = sum(most) - total
            if spare < 0:
                break
            more = [max(low, high - spare) for low, high in zip(least, most, strict=True)]
            if not again or more == least:
                break
            least, bounds = more, bounds_of(self.flow, more)
        return most

    @cached_property
    def once(self) -> float:
        """What is done once a step, at least."""
        return least_once(self.costs, self.ranks, self.line.schedule)

    def _held(self, stage: int, layers: int) -> Held:
        """What a stage holds with so many layers."""
        return Held(layers, stage == 0, stage == self.course.num_stages - 1)


def most_for(needed: Callable[[int], float], budget: float, most: int) -> int:
    """The most layers, of ``most``, that need no more than a budget; -1 where not even none do.

    Where more need more: looked for first where they would be if each needed as much.
    """
    ends = [(0, needed(0)), (most, needed(most))]
    if ends[0][1] > budget:
        return -1
    while ends[1][1] > budget:
        (low, least), (high, all_of_it) = ends
        if high == low + 1:
            return low
        part = 0.5 if all_of_it == inf else (budget - least) / (all_of_it - least)
        middle = min(max(low + 1, low + int(part * (high - low))), high - 1)
        there = middle, needed(middle)
        ends[there[1] > budget] = there
    return ends[1][0]

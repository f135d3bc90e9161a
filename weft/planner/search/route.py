"""One pipeline whose layers are still open: how many each mesh may take, and what a split costs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from math import inf

from weft.cluster.view import ClusterView, Reach
from weft.cost.choice import StageChoice
from weft.cost.sends import far_between
from weft.cost.times import BorderTimes, StageTimes
from weft.cost.traffic import Far
from weft.planner.search.bounds import Flow, bounds_of, least_once, mesh_times
from weft.planner.search.choice import Line, Section, Timed, stage_layers, used_cluster
from weft.planner.search.costs import Costs, Held, Rank
from weft.schedules.border_memory import borders_at_peak
from weft.schedules.known import Pattern, held_at_peak
from weft.schedules.registry import SCHEDULES
from weft.simulate.play import last_samples, last_size
from weft.simulate.tape import seconds_each, tape_of

FULL_AFTER = 3
"""Microbatches for each mesh, after which the next for each is taken for all that follow."""
REPEATING = ("1f1b", "zb-h1")
"""Schedules that repeat themselves after fewer microbatches than meshes, which is looked for."""
PLAYED_WHOLE = 6000
"""Actions up to which a step is played to its end."""
_NOTHING = BorderTimes()
_NO_TIME = StageTimes(forward_s=0.0, input_grad_s=0.0, weight_grad_s=0.0)


@dataclass(frozen=True)
class Route:
    """A pipeline on a cluster."""

    costs: Costs
    line: Line
    """Its layers are not looked at."""

    def with_numbers(self, in_flight: tuple[int, ...]) -> Route:
        """With so many microbatches in flight."""
        same = in_flight == self.line.in_flight
        return self if same else Route(self.costs, replace(self.line, in_flight=in_flight))

    @cached_property
    def num_meshes(self) -> int:
        return self.line.num_meshes

    @cached_property
    def pattern(self) -> Pattern:
        """Of its schedule."""
        line = self.line
        num_stages = SCHEDULES[line.schedule].chunks * self.num_meshes
        many = -(-line.samples // line.micro)
        return Pattern(line.schedule, self.num_meshes, num_stages, many, line.in_flight)

    @property
    def sizes(self) -> tuple[int, int]:
        """Samples of a microbatch, and of the last."""
        return self.line.micro, last_samples(self.line.samples, self.line.micro)

    @cached_property
    def positions(self) -> list[tuple[int, ...]]:
        """The stages of each mesh."""
        return SCHEDULES[self.line.schedule].placement(self.num_meshes, self.pattern.num_stages)

    @cached_property
    def peaks(self) -> list[tuple[tuple[int, ...], float]]:
        """Of each mesh: microbatches of its stages, and tensors at its borders."""
        borders = borders_at_peak(self.pattern, self._largest_message)
        return list(zip(held_at_peak(self.pattern), borders, strict=True))

    @property
    def _largest_message(self) -> float:
        """Of those between its meshes, as a part of its tensor's bytes."""
        if not self.costs.options.border:
            return 1.0
        parts = (
            self.costs.message_part(self.ranks[here], self.ranks[there], inside=reach == "node")
            for here, there, reach, _ in self._sides
            if here != there
        )
        return max(parts, default=1.0)

    @cached_property
    def ends(self) -> list[tuple[tuple[bool, bool], ...]]:
        """For each stage of each mesh, whether it is the model's first and its last."""
        last = self.pattern.num_stages - 1
        return [tuple((s == 0, s == last) for s in stages) for stages in self.positions]

    @cached_property
    def used(self) -> ClusterView:
        """Its chips, in the order in which its ranks are numbered."""
        return used_cluster([self.line], self.costs.problem.cluster)

    @cached_property
    def ranks(self) -> list[Rank]:
        """Of each mesh."""
        return self._ranks(self.costs.choice)

    def _ranks(self, choice_of: Callable[[Section, int], StageChoice]) -> list[Rank]:
        found = []
        for section, part in zip(self.line.sections, self.used.pools, strict=True):
            choice = choice_of(section, -(-self.line.micro // section.ways))
            found += [Rank(section.pool, part.chips_per_node, choice)] * section.meshes
        return found

    @cached_property
    def borders(self) -> list[BorderTimes]:
        """Between stages ``s`` and ``s + 1``."""
        return [self._border(*sides) for sides in self._sides]

    @cached_property
    def _sides(self) -> list[tuple[int, int, Reach, Far | None]]:
        """Of each border its meshes, and how far these are apart."""
        used = self.used
        ends, first = [], 0
        for rank in self.ranks:
            last = first + rank.choice.num_ranks
            ends.append((first, last - 1))
            first = last
        places = [used.site_of(own) for own, _ in ends]
        mesh_of = {stage: mesh for mesh, held in enumerate(self.positions) for stage in held}
        pairs = [*pairwise(mesh_of[s] for s in range(len(mesh_of)))]
        times = self.costs.num_pipelines
        return [
            (
                here,
                there,
                used.reach((*ends[here], *ends[there])),
                far_between(places, pairs, (here, there), times=times) if used.sites else None,
            )
            for here, there in pairs
        ]

    def _border(self, here: int, there: int, reach: Reach, far: Far | None) -> BorderTimes:
        if here == there:
            return _NOTHING
        ranks = self.ranks[here], self.ranks[there]
        return self.costs.border(ranks, self.sizes, reach=reach, far=far)

    def timed(self, layers: tuple[int, ...]) -> Timed:
        """The pipeline with these layers on its meshes."""
        return Timed(self.seconds(layers), replace(self.line, layers=layers))

    def seconds(self, layers: Sequence[int]) -> float:
        """A step of the pipeline and what is done once, as ``time_of_plan`` says it."""
        counts = stage_layers(self.line.schedule, tuple(layers))
        times: list[StageTimes] = [_NO_TIME] * len(counts)
        once = 0.0
        for rank, stages in zip(self.ranks, self.positions, strict=True):
            for stage in stages:
                times[stage] = self._times(rank, self._held(stage, counts[stage]))
            once = max(once, sum(times[stage].update_s for stage in stages))
        return self._until_last_backward(times) + once

    def _times(self, rank: Rank, held: Held) -> StageTimes:
        """Of a stage, with a smaller last microbatch where there is one."""
        micro, last = self.sizes
        if last == micro:
            return self.costs.times(rank, held)
        return self.costs.ragged(rank, rank.most(last), held)

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

    def _until_last_backward(self, times: Sequence[StageTimes]) -> float:
        """A long step grows with its microbatches, and no less than its busiest mesh or border."""
        size = last_size(self.line.samples, self.line.micro)
        first, last = self.played[0], self.played[-1]
        more = self.pattern.num_microbatches - last.num_microbatches
        if not more:
            return tape_of(last).end(times, self.borders, size)
        if last is first:
            ended = tape_of(last).play(times, self.borders, size)[1]
            end, each = max(ended), seconds_each(last, ended)
        else:
            ends = [tape_of(part).end(times, self.borders, size) for part in self.played]
            end, each = ends[-1], (ends[-1] - ends[0]) / self.num_meshes
        busy = max(
            sum(times[s].of("F") + times[s].of("B") for s in held) for held in self.positions
        )
        return end + more * max(each, busy, self._carrying())

    def bytes(self, mesh: int, layers: int) -> float:
        """Memory of one rank of a mesh that holds so many layers; without end where its host has
        no room for what waits there."""
        state = working = buffers = runtime = on_host = 0.0
        held, borders = self.peaks[mesh]
        rank, chunks = self.ranks[mesh], len(held)
        for number, (stage, count) in enumerate(zip(self.positions[mesh], held, strict=True)):
            share = (layers + chunks - 1 - number) // chunks
            part = self.costs.bytes(rank.pool, rank.choice, self._held(stage, share))
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
        most, rooms = self.costs.num_layers, self.costs.rooms
        result = []
        for mesh, peak in enumerate(self.peaks):
            rank = self.ranks[mesh]
            key = rank, peak, self.ends[mesh]
            if key not in rooms:
                needed = partial(self.bytes, mesh)
                budget = self.costs.budgets[rank.pool]
                rooms[key] = bisect_right(range(most + 1), budget, key=needed) - 1
            result.append(rooms[key])
        return result

    @cached_property
    def least(self) -> list[int]:
        """The fewest layers of each mesh: the ends may hold none."""
        return [int(not any(map(any, ends))) for ends in self.ends]

    def most_within(self, seconds: float, room: Sequence[int] | None = None) -> list[int]:
        """The most layers of each mesh with which a step may take no more, and that fit.

        What the others cannot hold a mesh must, and that delays those behind it: so twice.
        ``room``: what fits, if not what memory says; then at any level of ZeRO.
        """
        total = self.costs.num_layers
        fits = self.room if room is None else room
        least, most = self.least, list(fits)
        seconds -= self.once if room is None else 0.0
        for _ in range(2):
            bounds = bounds_of(self.flow, least)
            most = [min(layers, bounds.most(mesh, seconds)) for mesh, layers in enumerate(fits)]
            spare = sum(most) - total
            if spare < 0:
                break
            least = [max(low, high - spare) for low, high in zip(least, most, strict=True)]
        return most

    @cached_property
    def flow(self) -> Flow:
        """What bounds know of it, apart from how many layers its meshes have."""
        free = self._ranks(self.costs.without_ways)
        split = SCHEDULES[self.line.schedule].splits_backward
        times = cache(partial(mesh_times, self.costs, split=split))
        micro, last = self.sizes
        small = [rank._replace(choice=rank.choice.taking(rank.most(last))) for rank in free]
        meshes = [times(*each) for each in zip(free, self.ends, strict=True)]
        return Flow(
            meshes=meshes,
            lasts=meshes
            if last == micro
            else [times(*each) for each in zip(small, self.ends, strict=True)],
            borders=self.borders,
            carrying=self._carrying(),
            carrying_last=self._carrying(last=True),
            line=self.line,
            num_layers=self.costs.num_layers,
        )

    @property
    def cycle_s(self) -> float:
        """About what a microbatch more takes at least: all meshes at work, or a border."""
        rates = (1 / mesh.whole.each for mesh in self.flow.meshes)
        return max(self.costs.num_layers / sum(rates), self.flow.carrying)

    def _carrying(self, *, last: bool = False) -> float:
        """Seconds for which what sends longest is busy with a full microbatch, or with the last: a
        way over a border, or a mesh's port where that is all that leaves it by."""
        size = last_size(self.line.samples, self.line.micro)
        mesh_of = {stage: mesh for mesh, held in enumerate(self.positions) for stage in held}
        ports, most = [0.0] * self.num_meshes, 0.0
        for stage, border in enumerate(self.borders):
            full_s, last_s = border.of_sizes(size)
            seconds = last_s if last else full_s
            most = max(most, seconds)
            if border.is_shared:
                ports[mesh_of[stage]] += seconds
                ports[mesh_of[stage + 1]] += seconds
        return max(most, *ports)

    @cached_property
    def once(self) -> float:
        """What is done once a step, at least."""
        return least_once(self.costs, self.ranks, self.line.schedule)

    def _held(self, stage: int, layers: int) -> Held:
        """What a stage holds with so many layers."""
        return Held(layers, stage == 0, stage == self.pattern.num_stages - 1)

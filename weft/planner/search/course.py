"""Where one pipeline goes and what it carries, whatever its stages keep: its meshes and borders.

Levels of ZeRO, domains, numbers in flight and layers are all still open: all routes on a course ask
it the same. Courses that differ in their schedule alone have the same places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise

from weft.cluster.view import ClusterView, Reach, Site
from weft.cost.sends import far_between
from weft.cost.times import BorderTimes
from weft.cost.traffic import Far
from weft.planner.search.bounds import Bounds, Flow, bounds_of
from weft.planner.search.choice import Line, Section, used_cluster, used_parts
from weft.planner.search.costs import Costs, Rank
from weft.planner.search.slopes import MeshTimes
from weft.schedules.action import Kind
from weft.schedules.registry import SCHEDULES
from weft.simulate.play import last_samples

_NOTHING = BorderTimes()


def course_of(line: Line) -> Line:
    """Equal for lines on one course, in which costs are the same."""
    sections = tuple(section._replace(zero=0, shard_ways=0) for section in line.sections)
    last = last_samples(line.samples, line.micro)
    return Line(sections, line.micro, line.schedule, (), last)


def places_of(course: Line) -> Line:
    """Equal for courses whose meshes are in the same places."""
    return replace(course, schedule="1f1b", samples=course.micro)


@dataclass(frozen=True)
class Places:
    """Of the meshes of a pipeline on a cluster."""

    costs: Costs
    line: Line
    """As ``places_of`` has it."""

    @cached_property
    def used(self) -> ClusterView:
        """Its chips, in the order in which its ranks are numbered."""
        return used_cluster([self.line], self.costs.problem.cluster)

    @cached_property
    def ranks(self) -> list[Rank]:
        """Of each mesh, with ZeRO that costs nothing."""
        found = []
        for section, per_node in self.sections:
            choice = self.costs.without_ways(section, self.most(section))
            found += [self.costs.rank(section.pool, per_node, choice)] * section.meshes
        return found

    @cached_property
    def sections(self) -> list[tuple[Section, int]]:
        """With the chips of each node that they fill."""
        pools = self.costs.problem.cluster.pools
        every = self.line.sections
        return [(each, used_parts(pools[each.pool], each)[0].chips_per_node) for each in every]

    def most(self, section: Section) -> int:
        """Samples of a microbatch that a rank has at most."""
        return -(-self.line.micro // section.ways)

    @cached_property
    def between(self) -> Callable[[int, int], Reach]:
        """How far two meshes are apart."""
        ends, used = self._ends, self.used
        return cache(lambda here, there: used.reach((*ends[here], *ends[there])))

    @cached_property
    def sites(self) -> list[Site | None]:
        """Where each mesh is; empty where all are in one place."""
        return [self.used.site_of(own) for own, _ in self._ends] if self.used.sites else []

    @cached_property
    def _ends(self) -> list[tuple[int, int]]:
        """The first and the last rank of each mesh."""
        firsts = accumulate((rank.choice.num_ranks for rank in self.ranks), initial=0)
        return [(first, end - 1) for first, end in pairwise(firsts)]


@dataclass(frozen=True)
class Course:
    """Of a pipeline on a cluster."""

    places: Places
    line: Line
    """As ``course_of`` has it: its samples are those of the last microbatch."""

    @property
    def costs(self) -> Costs:
        return self.places.costs

    @property
    def ranks(self) -> list[Rank]:
        """Of each mesh, with ZeRO that costs nothing."""
        return self.places.ranks

    @cached_property
    def num_meshes(self) -> int:
        return self.line.num_meshes

    @cached_property
    def num_stages(self) -> int:
        return SCHEDULES[self.line.schedule].chunks * self.num_meshes

    @cached_property
    def positions(self) -> list[tuple[int, ...]]:
        """The stages of each mesh."""
        return SCHEDULES[self.line.schedule].placement(self.num_meshes, self.num_stages)

    @cached_property
    def ends(self) -> list[tuple[tuple[bool, bool], ...]]:
        """For each stage of each mesh, whether it is the model's first and its last."""
        last = self.num_stages - 1
        return [tuple((s == 0, s == last) for s in stages) for stages in self.positions]

    @cached_property
    def least(self) -> list[int]:
        """The fewest layers of each mesh: the ends may hold none."""
        return [int(not any(map(any, ends))) for ends in self.ends]

    @property
    def sizes(self) -> tuple[int, int]:
        """Samples of a microbatch, and of the last."""
        return self.line.micro, self.line.samples

    @property
    def last_size(self) -> float:
        """Of the last microbatch, as a part of a full one."""
        return self.line.samples / self.line.micro

    @cached_property
    def sides(self) -> list[tuple[int, int, Reach, Far | None]]:
        """Of each border its meshes, and how far these are apart."""
        places, between, mesh_of = self.places.sites, self.places.between, self._mesh_of
        pairs = [*pairwise(mesh_of[s] for s in range(len(mesh_of)))]
        far: Callable[[tuple[int, int]], Far | None] = (
            partial(far_between, places, pairs, times=self.costs.num_pipelines)
            if places
            else lambda _: None
        )
        return [(*pair, between(*pair), far(pair)) for pair in pairs]

    @property
    def _mesh_of(self) -> dict[int, int]:
        """Of each stage."""
        return {stage: mesh for mesh, held in enumerate(self.positions) for stage in held}

    @cached_property
    def borders(self) -> list[BorderTimes]:
        """Between stages ``s`` and ``s + 1``."""
        between, ranks, sizes = self.costs.border, self.ranks, self.sizes
        return [
            between((ranks[here], ranks[there]), sizes, reach, far) if here != there else _NOTHING
            for here, there, reach, far in self.sides
        ]

    @cached_property
    def largest_message(self) -> float:
        """Of those between its meshes, as a part of its tensor's bytes."""
        if not self.costs.options.border:
            return 1.0
        parts = (
            self.costs.message_part(self.ranks[here], self.ranks[there], inside=reach == "node")
            for here, there, reach, _ in self.sides
            if here != there
        )
        return max(parts, default=1.0)

    def flow(self, line: Line) -> Flow:
        """What bounds know of a pipeline on it."""
        return Flow(
            meshes=self._meshes,
            lasts=self._lasts,
            borders=self.borders,
            carrying=self.carrying,
            carrying_last=self._carrying_last,
            line=line,
            num_layers=self.costs.num_layers,
        )

    def bounds(self, samples: int, in_flight: tuple[int, ...]) -> Bounds:
        """Of a step with so many samples and microbatches in flight, where meshes have the fewest
        layers; asked several times in a row."""
        key, known = (samples, in_flight), self._known_bounds
        if key not in known:
            known.clear()
            line = replace(self.line, samples=samples, in_flight=in_flight)
            known[key] = bounds_of(self.flow(line), self.least)
        return known[key]

    @cached_property
    def _known_bounds(self) -> dict[tuple[int, tuple[int, ...]], Bounds]:
        """The last."""
        return {}

    @cached_property
    def _meshes(self) -> list[MeshTimes]:
        return self._times(self.ranks)

    @cached_property
    def _lasts(self) -> list[MeshTimes]:
        micro, last = self.sizes
        if last == micro:
            return self._meshes
        small = [self.costs.taking(rank, rank.most(last)) for rank in self.ranks]
        return self._times(small)

    def _times(self, ranks: list[Rank]) -> list[MeshTimes]:
        back: Kind = "I" if SCHEDULES[self.line.schedule].splits_backward else "B"
        times = self.costs.mesh_times
        return [times(rank, ends, back) for rank, ends in zip(ranks, self.ends, strict=True)]

    @cached_property
    def cycle_s(self) -> float:
        """About what a microbatch more takes at least: all meshes at work, or a border."""
        rates = (1 / mesh.whole.each for mesh in self._meshes)
        return max(self.costs.num_later / sum(rates), self.carrying)

    @cached_property
    def carrying(self) -> float:
        """Seconds for which what sends longest is busy with a full microbatch: a way over a border,
        or a mesh's port where that is all that leaves it by."""
        return self._carrying([border.of_sizes(self.last_size)[0] for border in self.borders])

    @cached_property
    def _carrying_last(self) -> float:
        """Likewise with the last."""
        return self._carrying([border.of_sizes(self.last_size)[1] for border in self.borders])

    def _carrying(self, every: list[float]) -> float:
        mesh_of, ports = self._mesh_of, [0.0] * self.num_meshes
        for stage, (seconds, border) in enumerate(zip(every, self.borders, strict=True)):
            if border.is_shared:
                ports[mesh_of[stage]] += seconds
                ports[mesh_of[stage + 1]] += seconds
        return max([0.0, *every, *ports])

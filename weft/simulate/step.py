"""One step of a plan on a cluster: every pipeline's timeline, and what is done once.

Stages are costed one by one (``weft.cost``) and played by the schedule that the executor runs.
Stages of the same kind are costed once, so a search may ask thousands of times a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import log2

from weft.cluster.cluster import HOST
from weft.cluster.view import ChipPool, ClusterView, Site, count_by_level
from weft.cost.choice import (
    Group,
    StageChoice,
    choice_of,
    most_samples,
    num_sites,
    sites_along_axes,
    state_parts,
    ways_of_domains,
)
from weft.cost.memory import Overheads, params_of
from weft.cost.profile import Profile
from weft.cost.rates import CostFunction, Roofline
from weft.cost.sends import (
    border_bytes,
    border_times,
    border_width,
    carried_part,
    far_between,
    gathered_part,
    sums_part,
)
from weft.cost.sent import narrow_part
from weft.cost.times import BorderTimes, StageTimes, longest
from weft.cost.timing import WEFT, Hardware, Software, stage_times
from weft.cost.traffic import LINK_REACHED, MADE_REACHED, NETWORK_REACHED, Fabric, Far, WayOut
from weft.cost.work import ALL_BY_ADAMW, Training
from weft.memory.tiers import USUAL, Rates
from weft.models.registry import shape_of
from weft.models.shape import ModelShape
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.simulate.play import Timeline, last_samples, simulate_plan

HOST_REACHED = 0.8
"""Of a chip's way to its host, by copies from and to page-locked memory."""
GLOO_TRIPS = 2
"""As ``Fabric.trips``; measured: ``docs/performance.md``."""
TOTALS_BYTES = 40.0
"""Loss, weights and norm of a step, which all ranks sum before they update."""


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """What is known besides the catalogue."""

    chips: Mapping[str, CostFunction] = field(default_factory=dict)
    """By chip name: a profile, or the vendor's own cost function; others get their class's."""
    hardware: Mapping[str, Hardware] = field(default_factory=dict)
    """By chip name: chip, links and software as measured; nothing of the catalogue is used."""
    overheads: Mapping[str, Overheads] = field(default_factory=dict)
    """By device family: what ``memory_of_plan`` adds, where it was measured."""
    software: Software = WEFT
    host_bytes_s: float = 0.0
    """Where chips are parts of a processor's cores and links are made as slow as they are said to
    be: how fast a core sends, which takes its time. What a link takes longer than that hides.
    0: chips send by themselves, and links reach less."""
    tf32: bool = False
    """Products of fp32 numbers are in TF32 on chips of the catalogue that have it. What was
    measured was with all bits."""

    def stretch(self, num_ranks: int) -> float:
        """How many times longer a step takes because the last of so many ranks is late."""
        return 1 + self.software.straggle * log2(num_ranks)

    def hardware_of(self, pool: ChipPool) -> Hardware:
        """Costs of a pool's chips and links.

        Raises:
            ConfigError: the catalogue lacks something, and nothing here replaces it.
        """
        trips = GLOO_TRIPS if pool.chip.device == HOST else 1
        if pool.chip.name in self.hardware:
            hardware = self.hardware[pool.chip.name]
            fabric = replace(hardware.fabric, chips_per_node=pool.chips_per_node)
            fabric = replace(fabric, ways_out=_ways_out(pool.site), trips=trips)
            return replace(hardware, fabric=fabric, tiers=_tiers(pool))
        chip = self.chips.get(pool.chip.name)
        made = self.host_bytes_s > 0
        fabric = Fabric(
            chips_per_node=pool.chips_per_node,
            inside_bytes_s=pool.link_bytes_s * (MADE_REACHED if made else LINK_REACHED),
            across_bytes_s=pool.network_bytes_s * (MADE_REACHED if made else NETWORK_REACHED),
            inside_latency_s=pool.link_latency_s,
            across_latency_s=pool.network_latency_s,
            ways_out=_ways_out(pool.site),
            trips=trips,
        )
        return Hardware(
            chip=chip or Roofline.of(pool.chip, tf32=self.tf32),
            fabric=fabric,
            software=self._software(pool),
            tiers=_tiers(pool),
        )

    def totals_s(self, cluster: ClusterView) -> float:
        """What the sum of a step's totals over all of these chips takes, which nothing hides."""
        places = count_by_level(pool.site for pool in cluster.pools)
        group = Group(cluster.world_size, sites=places)
        near = (replace(p, chips_per_node=cluster.chips_with(p)) for p in cluster.pools)
        fabrics = (self.hardware_of(pool).fabric for pool in near)
        return max(fabric.seconds("all_reduce", TOTALS_BYTES, group) for fabric in fabrics)

    def _software(self, pool: ChipPool) -> Software:
        """On this kind of chip."""
        chip = self.chips.get(pool.chip.name)
        software = chip.software if isinstance(chip, Profile) else self.software
        if not self.host_bytes_s:
            return software
        own_bytes_s = self.host_bytes_s * pool.speed
        hidden = max(1 - pool.network_bytes_s * MADE_REACHED / own_bytes_s, 0.0)
        return replace(software, data_hidden=hidden)


def _tiers(pool: ChipPool) -> Rates:
    """Of one chip: its own way to the host, and its part of the node's disk."""
    host, disk = pool.host_gb_s or pool.chip.host_gb_s, pool.disk_gb_s
    return Rates(
        host=host * 1e9 * HOST_REACHED if host else USUAL.host,
        disk=(disk * 1e9 if disk else USUAL.disk) / pool.chips_per_node,
    )


def _ways_out(site: Site | None) -> tuple[WayOut, ...]:
    return tuple(map(WayOut.of, site.around)) if site else ()


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step."""

    timelines: tuple[Timeline, ...]
    """Of every pipeline."""
    once_s: tuple[float, ...]
    """By pipeline: reducing, updating and publishing that nothing hides."""
    stretch: float
    """How many times longer it takes because the last of many ranks is late."""

    @property
    def step_s(self) -> float:
        """Until the last pipeline is done; all wait for it. One that only keeps has the sums once
        the others have computed them."""
        computed_s = max(timeline.step_s for timeline in self.timelines)
        both = zip(self.timelines, self.once_s, strict=True)
        return self.stretch * max((line.step_s or computed_s) + once for line, once in both)

    def busy_s(self, plan: Plan) -> tuple[float, ...]:
        """How long each rank of the plan computes.

        Nothing where those of a mesh have unlike shares: times are of the one that takes longest.
        """
        if plan.has_unlike_shares:
            return ()
        found: dict[int, float] = {}
        for pipeline, timeline, once in zip(
            plan.pipelines, self.timelines, self.once_s, strict=True
        ):
            for stages, seconds in zip(pipeline.positions(), timeline.busy_s, strict=True):
                ranks = pipeline.stages[stages[0]].mesh.ranks
                found |= dict.fromkeys(ranks, seconds + once)
        return tuple(found[rank] for rank in sorted(found))


def time_in_sites(plan: Plan, time: Callable[[Plan], StepTime]) -> StepTime:
    """Of a step in which sites do not meet. ``time``: of what one does."""
    if not plan.sites:
        return time(plan)
    found: dict[int, tuple[Timeline, float]] = {}
    stretch = 1.0
    for site in plan.by_site():
        of_site = time(site)
        stretch = max(stretch, of_site.stretch)
        parts = zip(site.pipelines, of_site.timelines, of_site.once_s, strict=True)
        found |= {_first_rank(pipeline): (line, once) for pipeline, line, once in parts}
    both = [found[_first_rank(pipeline)] for pipeline in plan.pipelines]
    return StepTime(tuple(line for line, _ in both), tuple(once for _, once in both), stretch)


def _first_rank(pipeline: PipelinePlan) -> int:
    return pipeline.stages[0].mesh.ranks[0]


def time_of_plan(
    plan: Plan,
    spec: ModelSpec,
    cluster: ClusterView,
    *,
    seq_len: int,
    knowledge: Knowledge | None = None,
    training: Training = ALL_BY_ADAMW,
) -> StepTime:
    """Predict a step of a plan.

    Raises:
        ConfigError: the plan needs a rank, or a rate, that is not known.
    """
    known = knowledge or Knowledge()
    timelines, once = [], []
    totals_s = known.totals_s(_used(plan, cluster))
    times = times_of_plan(plan, spec, cluster, seq_len=seq_len, knowledge=known, training=training)
    for pipeline, (stages, borders) in zip(plan.pipelines, times, strict=True):
        timelines.append(simulate_plan(pipeline, stages, borders))
        positions = pipeline.positions()
        update_s = max(sum(stages[number].update_s for number in held) for held in positions)
        once.append(update_s + totals_s)
    return StepTime(tuple(timelines), tuple(once), known.stretch(plan.world_size))


def _used(plan: Plan, cluster: ClusterView) -> ClusterView:
    """Its pools, without those of which the plan has no rank."""
    if plan.world_size == cluster.world_size:
        return cluster
    ranks = [rank for _, _, stage in plan.stages() for rank in stage.mesh.ranks]
    return ClusterView(tuple(pool for pool, _ in cluster.by_pool(ranks)))


def _speaking(stage: StagePlan, cluster: ClusterView) -> Sequence[int]:
    """Ranks that may take unlike times: where parts are alike, one of each sort of pool speaks for
    the others, the first also for nodes with fewer chips."""
    ranks = stage.mesh.ranks
    if stage.is_unlike:
        return ranks
    found: list[tuple[ChipPool, int]] = []
    for pool, some in cluster.by_pool(ranks):
        sort = replace(pool, num_nodes=1, chips_per_node=1, hosts=())
        if all(sort != other for other, _ in found):
            found.append((sort, some[0]))
    return [rank for _, rank in found]


def _in_mesh(hardware: Hardware, stage: StagePlan, cluster: ClusterView, rank: int) -> Hardware:
    """Where a mesh goes through several pools, its messages stay in a node as far as its ranks
    do."""
    ranks, pool = stage.mesh.ranks, cluster.pool_of(rank)
    if len(cluster.by_pool(ranks)) == 1:
        return hardware
    near = cluster.chips_with(pool)
    if not cluster.share_a_node(ranks):
        near = sum(cluster.node_of(other) == cluster.node_of(rank) for other in ranks)
    return replace(hardware, fabric=replace(hardware.fabric, chips_per_node=near))


def _far(
    plan: Plan, pipeline: PipelinePlan, ends: tuple[int, int], cluster: ClusterView
) -> Far | None:
    if not cluster.sites:
        return None
    every = [cluster.sites_of(stage.mesh.ranks) for stage in pipeline.stages]
    places = [sites[0] for sites in every]
    found = []
    for here, there in product(*(every[end] for end in ends)):
        places[ends[0]], places[ends[1]] = here, there
        far = far_between(places, pipeline.borders, ends, times=len(plan.pipelines))
        found += [far] if far else []
    return max(found, key=lambda far: (far.seconds(1.0), far.latency_s), default=None)


def _carried(
    pipeline: PipelinePlan, ends: tuple[StagePlan, StagePlan]
) -> tuple[list[float], float]:
    """What ``border_times`` wants of a border between two stages: parts of a full microbatch, and
    the last beside that."""
    full, rest = pipeline.microbatch, last_samples(pipeline.samples, pipeline.microbatch)

    def parts(size: int) -> list[float]:
        meshes = ((most_samples(stage, size), stage.mesh) for stage in ends)
        return [carried_part(size, most, m.sample_ways, len(m.ranks)) for most, m in meshes]

    return parts(full), max(parts(rest)) * rest / (max(parts(full)) * full)


def _last(
    shape: ModelShape,
    pipeline: PipelinePlan,
    stage: StagePlan,
    every: Mapping[int, tuple[StageChoice, Hardware]],
) -> StageTimes | None:
    """Of a stage in the last microbatch, where that is smaller; ``every``: of the ranks that
    speak for it."""
    size = last_samples(pipeline.samples, pipeline.microbatch)
    if size == pipeline.microbatch:
        return None
    most = {rank: most_samples(stage, size, rank) for rank in every}
    return longest(
        [
            stage_times(shape, choice.taking(most[rank]), hardware)
            for rank, (choice, hardware) in every.items()
            if most[rank]
        ]
    )


def _gathers(stage: StagePlan, choice: StageChoice, spec: ModelSpec, training: Training) -> float:
    """Part of the bytes of its parameters that a stage gathers."""
    if not stage.gather:
        return 1.0
    shape, layers = shape_of(spec), choice.holding(choice.work.layers, embeds=False, predicts=0.0)
    inside = sum(params_of(shape, layers)) / sum(params_of(shape, choice))
    narrow = inside * narrow_part(spec, training)
    return gathered_part(stage.gather, narrow, choice.state.weight)


def _sums(plan: Plan, stage: StagePlan, ways: int, training: Training) -> tuple[float, float]:
    """Part of the bytes of gradients that is sent between domains, and inside each; where all sum
    at once, in no parts, the first is of all."""
    width = training.state(stage.precision).grad
    inside = sums_part(stage.reduction, width)
    return sums_part(plan.sums, width) if stage.zero or ways else inside, inside


def times_of_plan(
    plan: Plan,
    spec: ModelSpec,
    cluster: ClusterView,
    *,
    seq_len: int,
    knowledge: Knowledge,
    training: Training = ALL_BY_ADAMW,
) -> Iterator[tuple[list[StageTimes], list[BorderTimes]]]:
    """By pipeline, what its schedule is played with.

    Raises:
        ConfigError: the plan needs a rank, or a rate, that is not known.
    """
    shape = shape_of(spec)

    def border(
        pipeline: PipelinePlan, ends: tuple[int, int], sides: Sequence[Sequence[Hardware]]
    ) -> BorderTimes:
        """Between two stages."""
        stage, after = pipeline.stages[ends[0]], pipeline.stages[ends[1]]
        if stage.mesh.ranks == after.mesh.ranks:
            return BorderTimes()
        sizes = pipeline.microbatch, seq_len, border_width(pipeline, ends[0], shape.d_model)
        parts, last = _carried(pipeline, (stage, after))
        return border_times(
            border_bytes(stage.precision, *sizes, cast=stage.border),
            parts,
            [each.fabric for end in ends for each in sides[end]],
            reach=cluster.reach((*stage.mesh.ranks, *after.mesh.ranks)),
            far=_far(plan, pipeline, ends, cluster),
            last=last,
        )

    ways, unlike, sites = ways_of_domains(plan), state_parts(plan), num_sites(plan, cluster)

    def slowest(p: int, number: int) -> StageTimes:
        """Of those ranks of a stage that may take unlike times."""
        pipeline = plan.pipelines[p]
        stage, parts = pipeline.stages[number], unlike.get((p, number), {})
        beside = len(plan.pipelines), training, ways[p, number]
        ranks = stage.mesh.ranks if parts else _speaking(stage, cluster)
        each = (
            choice_of(pipeline, number, seq_len, *beside, rank=rank, part=parts.get(rank))
            for rank in ranks
        )
        crossing, reduced = _sums(plan, stage, ways[p, number], training)
        places = sites.get((p, number), ())
        along = sites_along_axes(stage.mesh, cluster)
        every = {
            rank: (
                choice._replace(
                    work=choice.work._replace(sites=along),
                    crossing=crossing,
                    reduced=reduced,
                    sites=places,
                    gathers=_gathers(stage, choice, spec, training),
                ),
                _in_mesh(hardware(rank), stage, cluster, rank),
            )
            for choice, rank in zip(each, ranks, strict=True)
        }
        full = longest([stage_times(shape, *pair) for pair in every.values()])
        return replace(full, last=_last(shape, pipeline, stage, every))

    @lru_cache
    def hardware(rank: int) -> Hardware:
        return knowledge.hardware_of(cluster.pool_of(rank))

    for p, pipeline in enumerate(plan.pipelines):
        sides = [[*map(hardware, _speaking(stage, cluster))] for stage in pipeline.stages]
        numbers = range(len(sides))
        stages = [slowest(p, number) for number in numbers]
        yield stages, [border(pipeline, ends, sides) for ends in pipeline.borders]

"""What the search decides, in few numbers, and the plan that follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import Literal, NamedTuple

from weft.cluster.cluster import HOST
from weft.cluster.view import ChipPool, ClusterView
from weft.config.axes import NAMES, SAMPLE_AXES, SEARCHED
from weft.cost.work import Axes, copies_in, share
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, Recompute, ScheduleName, StagePlan, ZeroLevel
from weft.planner.casts import with_casts
from weft.planner.problem import Problem
from weft.precision.roles import Tier
from weft.schedules.registry import SCHEDULES

SAMPLES = SAMPLE_AXES[0]
"""The axis whose ranks compute different samples with the same parameters."""
SPREAD = tuple(name for name in SAMPLE_AXES if name != SAMPLES)
"""Those whose ranks divide something of the layers besides; they may leave a node, and are outside
those that do not."""
INSIDE = tuple(name for name in SEARCHED if name not in SAMPLE_AXES)
"""Axes that divide layers, inside a node; outermost first. Every axis whose entry does not say
otherwise is here by itself: which sizes a model allows, the axis says, and what a size costs and
saves follows from the logical dimensions that it divides (``weft.cost.work``)."""

LONG = tuple(name for name in NAMES if name not in (*SEARCHED, *SAMPLE_AXES))
"""Axes that are tried where nothing fits without; they may leave a node, and are outside those."""

FEW_CHIPS = 64
"""Up to which what takes much effort does not come last, more sections are combined, plans with
more ways to recompute are looked at longer, and shares are balanced where the first are slower than
what is known."""
MANY_CHIPS = 512
"""Up to which pipelines through several kinds are looked at longer, and what is nearly as fast is
refined too."""
FEW_TO_CUT = 4
"""Chips of several kinds, up to which pools are cut."""


def mesh_axes(ways: int, inner: Axes) -> Axes:
    """Of a mesh with so many ranks that hold the same, and compute other samples."""
    return ((SAMPLES, ways), *inner)


@lru_cache(maxsize=1 << 12)
def inner_of(axes: Axes) -> Axes:
    """Those that divide layers."""
    return tuple(axis for axis in axes if axis[0] != SAMPLES)


@lru_cache(maxsize=1 << 12)
def num_ranks(axes: Axes) -> int:
    """Of a mesh."""
    return prod(size for _, size in axes)


@lru_cache(maxsize=1 << 12)
def near_ranks(axes: Axes) -> int:
    """Of a mesh that are on one node because they divide layers."""
    return prod(size for name, size in axes if name not in (*SAMPLE_AXES, *LONG))


Apart = Literal["", "pipelines", "nodes"]
"""Which ranks are domains: all together, those of each pipeline, or those of each node."""


class Section(NamedTuple):
    """Consecutive meshes of one pipeline on one kind of chip, alike but for their layers.

    A tuple, for there are many, and costs are kept by them.
    """

    pool: int
    """Number of the pool in the cluster."""
    axes: Axes
    """Of each mesh, as a mesh has them."""
    meshes: int
    recompute: Recompute = "off"
    zero: ZeroLevel = 0
    shard_ways: int = 0
    """Ranks of one domain that hold the same parameters; 0 where all that do are in one."""

    @property
    def num_chips(self) -> int:
        return num_ranks(self.axes) * self.meshes

    @property
    def ways(self) -> int:
        """Into which a mesh divides samples."""
        return share(self.axes, "samples")

    @property
    def copies(self) -> int:
        """Ranks of a mesh that hold the same parameters."""
        return copies_in(self.axes)

    @property
    def together(self) -> int:
        """Chips that are on one node because they divide layers."""
        return near_ranks(self.axes)


def samples_at_once(sections: Iterable[Section], micro: int) -> int:
    """Of a microbatch, on the rank that has most."""
    return max(-(-micro // section.ways) for section in sections)


@dataclass(frozen=True, slots=True)
class Line:
    """One pipeline: through which kinds of chip it goes, and what it carries."""

    sections: tuple[Section, ...]
    micro: int
    """Samples of a microbatch, over all ranks of a stage."""
    schedule: ScheduleName
    layers: tuple[int, ...]
    """Of each mesh; a mesh with several stages divides them evenly."""
    samples: int
    apart: Apart = ""
    """The same for all pipelines side by side."""
    in_flight: tuple[int, ...] = ()
    """As a planned pipeline has it."""

    @property
    def num_meshes(self) -> int:
        return sum(section.meshes for section in self.sections)

    @property
    def num_chips(self) -> int:
        return sum(section.num_chips for section in self.sections)


@dataclass(frozen=True, slots=True)
class Timed:
    """A pipeline with all decided."""

    seconds: float
    """Of a step and what is done once, as if no rank were late."""
    line: Line


def used_parts(pool: ChipPool, section: Section) -> tuple[ChipPool, ...]:
    """The fewest nodes that hold its chips with equally many each, in whole groups; else, of a
    single mesh, full nodes and the rest on one more. None where it does not fill nodes."""
    chips, per_node = section.num_chips, pool.chips_per_node
    if nodes := nodes_for(chips, section.together, pool.num_nodes, per_node):
        return (replace(pool, num_nodes=nodes, chips_per_node=chips // nodes),)
    return ClusterView((pool,)).first(chips).pools if leaves_rest(section, pool) else ()


def leaves_rest(section: Section, pool: ChipPool) -> bool:
    """A mesh whose groups fill nodes, and the rest a part of one more."""
    group = num_ranks(inner_of(section.axes))
    whole = pool.chips_per_node % group == 0 and section.num_chips <= pool.num_chips
    return whole and section.meshes == 1 and pool.num_nodes > 1


@lru_cache(maxsize=1 << 16)
def nodes_for(num_chips: int, together: int, num_nodes: int, chips_per_node: int) -> int:
    """How many nodes hold so many chips with equally many each, in whole groups; 0: none do."""
    for nodes in range(-(-num_chips // chips_per_node), num_nodes + 1):
        if num_chips % (nodes * together) == 0:
            return nodes
    return 0


@lru_cache(maxsize=1 << 14)
def stage_layers(schedule: ScheduleName, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Layers of each stage, in model order; those of a mesh are divided evenly."""
    chunks = SCHEDULES[schedule].chunks
    if chunks == 1:
        return layers
    counts = [0] * (chunks * len(layers))
    for mesh, stages in enumerate(SCHEDULES[schedule].placement(len(layers), len(counts))):
        for number, stage in enumerate(stages):
            counts[stage] = (layers[mesh] + chunks - 1 - number) // chunks
    return tuple(counts)


def used_cluster(lines: Sequence[Line], cluster: ClusterView) -> ClusterView:
    """The chips that the lines use, in the order in which their ranks are numbered."""
    pools = list[ChipPool]()
    for line in lines:
        for section in line.sections:
            parts = used_parts(cluster.pools[section.pool], section)
            assert parts, f"{section} does not fill nodes of {cluster.pools}"
            pools += parts
    return ClusterView(tuple(pools))


def plan_of(lines: Sequence[Line], problem: Problem) -> Plan:
    """The plan of pipelines side by side, on ranks in the order of ``used_cluster``."""
    firsts = accumulate((line.num_chips for line in lines), initial=0)
    both = zip(lines, firsts, strict=False)
    pipelines = tuple(_pipeline(line, problem, first) for line, first in both)
    domains = domains_of(lines[0].apart, lines, problem.cluster)
    num_layers, options = problem.workload.spec.num_layers, problem.options
    plan = Plan(num_layers=num_layers, pipelines=pipelines, domains=domains)
    if not options.border:
        return plan
    node_of = used_cluster(lines, problem.cluster).node_of
    return with_casts(plan, options.border, options.border_between, node_of)


def domains_of(
    apart: Apart, lines: Sequence[Line], cluster: ClusterView
) -> tuple[tuple[int, ...], ...]:
    """The domains of a plan, on ranks in the order of ``used_cluster``."""
    if apart == "pipelines":
        sizes = [line.num_chips for line in lines]
    elif apart == "nodes":
        pools = used_cluster(lines, cluster).pools
        sizes = [pool.chips_per_node for pool in pools for _ in range(pool.num_nodes)]
    else:
        return ()
    ends = list(accumulate(sizes, initial=0))
    return tuple(tuple(range(*both)) for both in pairwise(ends))


def _tier(tier: Tier, problem: Problem, pool: int) -> Tier:
    """A processor keeps nothing in the memory of its host that is not its own."""
    on_host = problem.cluster.pools[pool].chip.device == HOST
    return "device" if tier == "host" and on_host else tier


def _pipeline(line: Line, problem: Problem, first: int) -> PipelinePlan:
    options = problem.options
    places = [section for section in line.sections for _ in range(section.meshes)]
    meshes = []
    for section in places:
        ranks = range(first, first + num_ranks(section.axes))
        meshes.append(Mesh(tuple(ranks), section.axes))
        first = ranks.stop
    counts = stage_layers(line.schedule, line.layers)
    positions = SCHEDULES[line.schedule].placement(len(meshes), len(counts))
    mesh_of = {stage: mesh for mesh, stages in enumerate(positions) for stage in stages}
    ends = [0, *accumulate(counts)]
    stages = []
    for number, layers in enumerate(pairwise(ends)):
        place = places[mesh_of[number]]
        stages.append(
            StagePlan(
                mesh=meshes[mesh_of[number]],
                layers=layers,
                device=problem.cluster.pools[place.pool].chip.device,
                precision=problem.workload.precision,
                recompute=place.recompute,
                zero=place.zero,
                state_tier=_tier(options.tiers[0], problem, place.pool),
                param_tier=_tier(options.param_tiers[0], problem, place.pool),
                expert_tier=_tier(options.expert_tiers[0], problem, place.pool),
            )
        )
    return PipelinePlan(
        stages=tuple(stages),
        samples=line.samples,
        microbatch=line.micro,
        schedule=line.schedule,
        in_flight=line.in_flight,
    )

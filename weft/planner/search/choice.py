"""What the search decides, in few numbers, and the plan that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from weft.cluster.view import ChipPool, ClusterView
from weft.cost.work import Axes, copies_in, share
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, Recompute, ScheduleName, StagePlan, ZeroLevel
from weft.planner.search.axes import inner_of, num_ranks
from weft.planner.workload import Workload
from weft.schedules.registry import SCHEDULES


def device_of(pool: ChipPool) -> str:
    """What PyTorch calls the chips of a pool."""
    return pool.chip.device


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive meshes of one pipeline on one kind of chip, alike but for their layers."""

    pool: int
    """Number of the pool in the cluster."""
    axes: Axes
    """Of each mesh, as a mesh has them."""
    meshes: int
    recompute: Recompute = "off"
    zero: ZeroLevel = 0

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
        return num_ranks(inner_of(self.axes))


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

    @property
    def num_meshes(self) -> int:
        return sum(section.meshes for section in self.sections)


def used_part(pool: ChipPool, num_chips: int, together: int) -> ChipPool | None:
    """The fewest nodes that hold so many chips with equally many each, in whole groups.

    None where there are no such nodes.
    """
    nodes = nodes_for(num_chips, together, pool.num_nodes, pool.chips_per_node)
    return replace(pool, num_nodes=nodes, chips_per_node=num_chips // nodes) if nodes else None


@lru_cache(maxsize=1 << 16)
def nodes_for(num_chips: int, together: int, num_nodes: int, chips_per_node: int) -> int:
    """How many nodes ``used_part`` takes; 0 where it finds none."""
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
    pools = []
    for line in lines:
        for section in line.sections:
            part = used_part(cluster.pools[section.pool], section.num_chips, section.together)
            assert part is not None, f"{section} does not fill nodes of {cluster.pools}"
            pools.append(part)
    return ClusterView(tuple(pools))


def plan_of(lines: Sequence[Line], workload: Workload, cluster: ClusterView) -> Plan:
    """The plan of pipelines side by side, on ranks in the order of ``used_cluster``."""
    pipelines = []
    first = 0
    for line in lines:
        pipelines.append(_pipeline(line, workload, cluster, first))
        first += sum(section.num_chips for section in line.sections)
    return Plan(num_layers=workload.spec.num_layers, pipelines=tuple(pipelines))


def _pipeline(line: Line, workload: Workload, cluster: ClusterView, first: int) -> PipelinePlan:
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
    stages = (
        StagePlan(
            mesh=meshes[mesh_of[number]],
            layers=layers,
            device=device_of(cluster.pools[places[mesh_of[number]].pool]),
            precision=workload.precision,
            recompute=places[mesh_of[number]].recompute,
            zero=places[mesh_of[number]].zero,
        )
        for number, layers in enumerate(pairwise(ends))
    )
    return PipelinePlan(
        stages=tuple(stages),
        samples=line.samples,
        microbatch=line.micro,
        schedule=line.schedule,
    )

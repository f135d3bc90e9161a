"""The chips of a bench as the planner sees them, and what their runs have shown of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.cluster.cluster import Dtype, Node
from weft.cluster.cluster_file import ClusterFile
from weft.cluster.view import ChipPool, ClusterView
from weft.config.errors import ConfigError
from weft.cost.operators import Op, Phase
from weft.cost.rates import CostFunction, Roofline
from weft.plan.plan import Plan
from weft.planner.problem import Problem, Workload
from weft.resolve.rank_chips import chips_of_lab
from weft.simulate.step import Knowledge, StepTime


@dataclass(frozen=True, slots=True)
class Kind:
    """The chips of one kind in a cluster."""

    name: str
    ranks: tuple[int, ...]
    """In the whole cluster."""


def kinds_of(cluster: ClusterFile) -> list[Kind]:
    """The kinds of chips, each with its ranks, in the order of the file.

    Raises:
        ConfigError: there is one kind: nothing is mixed.
    """
    found: dict[str, list[int]] = {}
    for rank, (_, chip) in enumerate(cluster.by_rank):
        found.setdefault(chip.kind, []).append(rank)
    if len(found) < 2:
        raise ConfigError("hosts.chips.kind", sorted(found), "at least two kinds of chips")
    return [Kind(name, tuple(ranks)) for name, ranks in found.items()]


def only(cluster: ClusterFile, kind: str) -> ClusterFile:
    """The part of a cluster that has one kind of chip, with its links."""
    hosts = []
    for host in cluster.hosts:
        chips = tuple(chip for chip in host.chips if chip.kind == kind)
        if chips:
            hosts.append(host.model_copy(update={"chips": chips}))
    return cluster.model_copy(update={"hosts": tuple(hosts)})


@dataclass(frozen=True, slots=True)
class Slower:
    """A chip that takes so many times as long as ``cost`` for everything it computes."""

    cost: CostFunction
    times: float

    def seconds(self, op: Op, phase: Phase, dtype: Dtype) -> float:
        return self.times * self.cost.seconds(op, phase, dtype)

    def moving_seconds(self, num_bytes: float) -> float:
        return self.times * self.cost.moving_seconds(num_bytes)


@dataclass(frozen=True, slots=True)
class Shown:
    """What runs have shown of chips, by name."""

    slower: Mapping[str, float] = field(default_factory=dict)
    """Times as long as what was known before takes."""
    memory_gib: Mapping[str, float] = field(default_factory=dict)
    """Of a chip, as memory is predicted: with more it was killed."""

    @staticmethod
    def all_of(several: Sequence[Shown]) -> Shown:
        """What was shown of unlike chips."""
        slower = {name: times for each in several for name, times in each.slower.items()}
        gib = {name: gib for each in several for name, gib in each.memory_gib.items()}
        return Shown(slower, gib)


@dataclass(frozen=True)
class Chips:
    """The chips of a lab's cluster."""

    pools: ClusterView
    """Kind by kind, for the search. Kinds count as if they shared no node."""
    by_rank: ClusterView
    """The same in the order of ranks."""
    knowledge: Knowledge
    is_guess: bool
    """The machine has no profile."""

    @staticmethod
    def of(cluster: ClusterFile, machine: Node, shown: Shown) -> Chips:
        """As parts of the machine's cores, corrected by what runs have shown."""
        known = chips_of_lab(cluster, machine)
        by_rank = [_limited(pool, shown) for pool in known.view.pools]
        pools = [
            replace(_limited(pool, shown), node=pool.node and f"{pool.node} of {kind}")
            for kind in dict.fromkeys(chip.kind for _, chip in cluster.by_rank)
            for pool in chips_of_lab(only(cluster, kind), machine).view.pools
        ]
        costs = dict(known.knowledge.chips)
        for pool in by_rank:
            name = pool.chip.name
            if name in shown.slower:
                before = known.knowledge.chips.get(name) or Roofline.of(pool.chip)
                costs[name] = Slower(before, shown.slower[name])
        return Chips(
            pools=ClusterView(tuple(pools)),
            by_rank=ClusterView(tuple(by_rank)),
            knowledge=replace(known.knowledge, chips=costs),
            is_guess=known.is_guess,
        )

    def time(self, plan: Plan, work: Workload) -> StepTime:
        """What a step of a plan is predicted to take."""
        return Problem(work, self.by_rank, self.knowledge).time(plan)

    def memory_gib(self, plan: Plan, work: Workload) -> list[float]:
        """What each rank of a plan is predicted to need."""
        need = Problem(work, self.by_rank, self.knowledge).memory(plan)
        return [need[rank].total / 2**30 for rank in range(plan.world_size)]

    def name(self, rank: int) -> str:
        """Of a rank's chip."""
        return self.by_rank.pool_of(rank).chip.name


def after_run(
    shown: Shown, chips: Chips, plan: Plan, work: Workload, busy_s: Sequence[float]
) -> Shown:
    """With how long the ranks of a run computed in a step, beside what was predicted.

    Args:
        chips: As they were known to be when that was predicted, by ``shown``.
        busy_s: By rank. It holds what speed alone does not show: the update, and what a rank's
            processor does to send and to wait.
    """
    predicted, measured = dict[str, float](), dict[str, float]()
    for rank, seconds in enumerate(_computing(chips.time(plan, work), plan)):
        name = chips.name(rank)
        predicted[name] = predicted.get(name, 0.0) + seconds
        measured[name] = measured.get(name, 0.0) + busy_s[rank]
    slower = dict(shown.slower)
    for name, seconds in predicted.items():
        if seconds and measured[name]:
            slower[name] = slower.get(name, 1.0) * measured[name] / seconds
    return replace(shown, slower=slower)


def after_shortage(shown: Shown, chips: Chips, *, rank: int, gib: float) -> Shown:
    """A rank's chip has less memory than that, as memory is predicted."""
    return replace(shown, memory_gib={**shown.memory_gib, chips.name(rank): gib})


def _limited(pool: ChipPool, shown: Shown) -> ChipPool:
    own = pool.chip.memory_gib
    gib = min(own, shown.memory_gib.get(pool.chip.name, own))
    return replace(pool, chip=replace(pool.chip, memory_gib=gib))


def _computing(time: StepTime, plan: Plan) -> list[float]:
    """Seconds of a step in which each rank is predicted to compute."""
    found = [0.0] * plan.world_size
    for pipeline, timeline in zip(plan.pipelines, time.timelines, strict=True):
        for stages, seconds in zip(pipeline.positions(), timeline.busy_s, strict=True):
            for rank in pipeline.stages[stages[0]].mesh.ranks:
                found[rank] = seconds
    return found

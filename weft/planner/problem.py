"""What the planner is asked: what is to be trained, on which chips, and what it may choose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf, prod

from weft.cluster.cluster import HOST
from weft.cluster.view import ClusterView
from weft.config.errors import ConfigError
from weft.config.plan_sections import Between
from weft.cost.flops import train_flops_per_token
from weft.cost.memory import Memory, fullest, memory_of_plan, room_of_plan
from weft.cost.sent import Way, sent_by_plan
from weft.cost.times import BorderTimes, StageTimes
from weft.cost.work import ALL_BY_ADAMW, Training
from weft.models.registry import shape_of
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan, Precision, Recompute, ScheduleName, StagePlan, ZeroLevel
from weft.precision.roles import Tier
from weft.schedules.registry import by_preference
from weft.simulate.step import Knowledge, StepTime, time_in_sites, time_of_plan, times_of_plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One step of a training job, before anybody says on which chips."""

    spec: ModelSpec
    seq_len: int
    samples: int
    """Of one step, over the whole job."""
    precision: Precision = "bf16"
    training: Training = ALL_BY_ADAMW

    def flops_s(self, step_s: float) -> float:
        """Model FLOP/s where a step takes so long."""
        flops = train_flops_per_token(self.spec, self.seq_len)
        return flops * self.seq_len * self.samples / step_s


MEMORY_PART = 0.92
"""Of each chip's memory that may be planned."""
FEW_PARTS = 8
"""Of a sample's tokens that are tried where there is a sample for each chip, and the samples of a
chip from which on none are: nine samples leave two of eight chips idle, or divide."""
MANY_DIVIDING = 64
"""Chips from which on these are half as many: a search of 64 took 1.7 times as long."""
MOST_DIVIDING = 1 << 15
"""Chips on which tokens of short samples may be divided."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How the chips of a pool are laid out; only layers and samples are left open."""

    axes: Mapping[str, int]
    """Of each mesh."""
    meshes: int
    micro: int
    """Samples of a microbatch, over all ranks of a mesh."""
    recompute: Recompute


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the search may choose among; the defaults are all that the runtime can run."""

    max_split: int | None = None
    """Into how many parts an axis may divide layers; None is all chips of a node."""
    micros: tuple[int, ...] | None = None
    """Samples of a microbatch that one rank may take; None is every power of two, and all of
    its own."""
    schedules: tuple[ScheduleName, ...] = field(default_factory=by_preference)
    """For pipelines of several meshes. Of plans that take as long, the first here is chosen."""
    recompute: tuple[Recompute, ...] = ("off", "full")
    mixed_recompute: bool = False
    """The best few plans that recompute may do so only as far as their chips' memory asks: with
    other modes, and in some layers."""
    divides_tokens: bool = False
    """Tokens of each sample may be divided too; without it that is tried where attention between
    them is most of the operations, or nothing fits."""
    few_parts: int = FEW_PARTS
    """Without it: parts at most of each sample's tokens where there are samples for all chips."""
    zero: tuple[ZeroLevel, ...] = (0, 1, 2, 3)
    tiers: tuple[Tier, ...] = ("device",)
    """Where what only updates need may be kept: the first with which something fits."""
    param_tiers: tuple[Tier, ...] = ("device",)
    """Likewise parameters, where something computes with copies of what is updated; another is
    tried when state is elsewhere already."""
    expert_tiers: tuple[Tier, ...] = ("device",)
    """Likewise experts, of one pipeline: another than the first is tried where memory rules plans
    out, and taken where it is faster, too."""
    domains: bool = False
    """What several nodes, or pipelines, hold may be summed inside each, then between them."""
    in_flight: bool = False
    """Pipelines may have more microbatches in flight than their schedule needs, where borders take
    long; and the best few plans an order made for their stages, borders and memory."""
    unlike_meshes: bool = False
    """Unlike chips may be one mesh: with shares of samples and state of their own where memory
    rules plans out, and of widths where they are in one machine."""
    cuts_layers: bool = False
    """Borders of the best few plans may be moved into layers, where the family lets them."""
    divides_heads: bool = False
    """The head's rows of the best few plans may be divided over positions, where the family lets
    them."""
    border: str = ""
    """What borders between stages are cast to; empty: they are not."""
    border_between: Between | None = None
    """Only those between these; None: all."""
    max_stages: int | None = None
    """Most meshes of one pipeline."""
    max_ranks: int | None = None
    """Most ranks of one mesh."""
    max_pipelines: int | None = None
    """Most pipelines side by side."""
    unlike_stages: bool = True
    """A pipeline may go through several kinds of chip."""
    shapes: Mapping[str, tuple[Shape, ...]] = field(default_factory=dict)
    """By chip: how its pools may be laid out; a chip that is not named is free."""
    memory_part: float = MEMORY_PART
    only_runnable: bool = False
    """Leave out what this version cannot run (``weft.planner.runnable``)."""
    leave_idle: bool = True
    """Pools and nodes may stay unused where that is faster."""
    effort: int = 130_000
    """Actions of schedules that may be made or played for each combination of chips, the most
    promising plans first; what is left counts as pruned by this limit. Small clusters need less."""

    def __post_init__(self) -> None:
        choices: dict[str, tuple[object, ...]] = {
            "schedules": self.schedules,
            "recompute": self.recompute,
            "zero": self.zero,
            "tiers": self.tiers,
            "param_tiers": self.param_tiers,
            "expert_tiers": self.expert_tiers,
        }
        for name, choice in choices.items():
            if not choice:
                raise ConfigError(f"options.{name}", [], "at least one choice")
        if not 0 < self.memory_part <= 1:
            raise ConfigError("options.memory_part", self.memory_part, "above 0, at most 1")

    def elsewhere(self) -> Iterator[Options]:
        """With one tier each for state and for parameters, in the order in which they are tried."""
        for params in self.param_tiers:
            for state in self.tiers:
                if params == self.param_tiers[0] or state != "device" or len(self.tiers) == 1:
                    yield replace(self, tiers=(state,), param_tiers=(params,))

    @property
    def any_shape(self) -> bool:
        """No chip is told how it is laid out."""
        return self.max_ranks is None and not self.shapes

    def allows(self, chip: str, shape: Shape) -> bool:
        """A pool of such chips may be laid out like that."""
        if self.max_ranks is not None and prod(shape.axes.values()) > self.max_ranks:
            return False
        return chip not in self.shapes or shape in self.shapes[chip]


@dataclass(frozen=True, slots=True)
class Problem:
    """A workload on a cluster. Beside a plan, the plan's ranks are numbered over the cluster."""

    workload: Workload
    cluster: ClusterView
    knowledge: Knowledge = field(default_factory=Knowledge)
    options: Options = field(default_factory=Options)

    @property
    def divides_tokens(self) -> bool:
        """Tokens of each sample may be divided, however many samples there are: that was asked for,
        or what grows with the square of their number is at least half of the operations."""
        spec, seq_len = self.workload.spec, self.workload.seq_len
        once, twice = (train_flops_per_token(spec, n) for n in (seq_len, 2 * seq_len))
        return self.options.divides_tokens or 2 * (twice - once) >= once

    @property
    def token_parts(self) -> int:
        """Parts at most into which tokens of each sample are divided; else as many as give every
        chip some of a sample, and a few where chips have few samples each: whole ones divide badly
        among them. 1 on so many chips that their search takes minutes without."""
        work, chips = self.workload, self.cluster.world_size
        if self.divides_tokens:
            return work.seq_len
        if chips > MOST_DIVIDING:
            return 1
        few = self.options.few_parts if chips < MANY_DIVIDING else self.options.few_parts // 2
        if any(pool.chip.device == HOST for pool in self.cluster.pools):
            few = 1  # what is sent takes the time of who computes
        return max(-(-chips // work.samples), min(few, -(-few * chips // work.samples)))

    def on(self, cluster: ClusterView) -> Problem:
        """The same with other chips."""
        return replace(self, cluster=cluster)

    def time(self, plan: Plan) -> StepTime:
        """Of a step of a plan, in which sites do not meet; see ``time_of_plan``."""
        work = self.workload
        return time_in_sites(
            plan,
            lambda site: time_of_plan(
                site,
                work.spec,
                self.cluster,
                seq_len=work.seq_len,
                knowledge=self.knowledge,
                training=work.training,
            ),
        )

    def times(self, plan: Plan) -> list[tuple[list[StageTimes], list[BorderTimes]]]:
        """By pipeline, of its stages and borders."""
        work = self.workload
        times = times_of_plan(
            plan,
            work.spec,
            self.cluster,
            seq_len=work.seq_len,
            knowledge=self.knowledge,
            training=work.training,
        )
        return list(times)

    def room(self, plan: Plan) -> list[tuple[int, ...]]:
        """By pipeline and position, microbatches of its stages for which its chips have room."""
        work, part = self.workload, self.options.memory_part * 2**30
        ranks = range(plan.world_size)
        limits = [part * self.cluster.pool_of(rank).chip.memory_gib for rank in ranks]
        known = self.knowledge.overheads
        return room_of_plan(plan, work.spec, work.seq_len, limits, known, work.training)

    def by_expert_tier(self) -> Iterator[Problem]:
        """With experts in one tier after the other, where that may differ. Elsewhere than on
        devices they are where one pipeline has all, and no domains are."""
        first, *others = self.options.expert_tiers
        chips = {pool.chip.device for pool in self.cluster.pools}
        able = (
            shape_of(self.workload.spec).experts is not None and self.workload.training.by_element
        )
        for tier in (first, *(others if able else ())):
            if tier == "device":
                yield self
            elif tier != "host" or chips != {HOST}:
                yield replace(self, options=_with_experts(self.options, tier))

    def memory(self, plan: Plan) -> dict[int, Memory]:
        """Of every rank of a plan."""
        work = self.workload
        known, found = self.knowledge.overheads, dict[int, Memory]()
        for site in plan.by_site():
            found |= memory_of_plan(site, work.spec, work.seq_len, known, work.training)
        return found

    def fullest(self, stage: StagePlan, memory: Mapping[int, Memory]) -> int:
        """The rank of a stage of a plan that has least room, by the memory of all."""
        return fullest(stage, memory, lambda rank: self.cluster.pool_of(rank).chip.memory_gib)

    def sent(self, plan: Plan) -> Mapping[Way, float]:
        """Bytes that a step of a plan sends, in which sites do not meet."""
        work, total = self.workload, dict[Way, float]()
        for site in plan.by_site():
            sent = sent_by_plan(
                site, work.spec, self.cluster, seq_len=work.seq_len, training=work.training
            )
            total |= {way: total.get(way, 0.0) + num_bytes for way, num_bytes in sent.items()}
        return total

    def with_memory(self, times: float) -> Problem:
        """The same chips with so many times the memory."""
        pools = (
            replace(pool, chip=replace(pool.chip, memory_gib=pool.chip.memory_gib * times))
            for pool in self.cluster.pools
        )
        return self.on(ClusterView(tuple(pools)))

    def with_links(self, inside: float, across: float) -> Problem:
        """The same chips with links of so many times the rate, inside nodes and beyond them; free
        ones for infinity."""
        pools = [
            replace(
                pool,
                chip=replace(pool.chip, link_gb_s=pool.link_bytes_s / 1e9 * inside),
                network_gbit_s=pool.network_bytes_s * 8e-9 * across,
                oversubscription=1.0,
                link_latency_s=0.0 if inside == inf else pool.link_latency_s,
                network_latency_s=0.0 if across == inf else pool.network_latency_s,
                site=pool.site and pool.site.faster(across),
            )
            for pool in self.cluster.pools
        ]
        hardware = {
            name: replace(known, fabric=known.fabric.faster(inside, across))
            for name, known in self.knowledge.hardware.items()
        }
        knowledge = replace(self.knowledge, hardware=hardware)
        return replace(self, cluster=ClusterView(tuple(pools)), knowledge=knowledge)


def _with_experts(options: Options, tier: Tier) -> Options:
    return replace(
        options, expert_tiers=(tier,), max_pipelines=1, domains=False, unlike_meshes=False
    )

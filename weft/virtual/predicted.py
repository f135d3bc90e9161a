"""Virtual chips: what a step would take on a cluster, computed and not run.

A chip of speed 0.4 is a core whose rates are 0.4 of the whole one's, which does the operations that
the planner counts (``weft.cost``); links carry what they are said to carry. Data, what
several messages on one link do to each other, and the second holder of a tied table are left out:
good for comparing plans and shares, not for a promise in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, combinations, product
from math import inf
from typing import Any, NamedTuple

from weft.cluster.cluster_file import ClusterFile, LinkEntry
from weft.config.errors import ConfigError
from weft.cost.choice import Group, by_layer, choice_of, dtype_of
from weft.cost.memory import BUCKET_BYTES
from weft.cost.rates import Roofline, compute_seconds
from weft.cost.sends import border_bytes, border_times, layer_sends, ranks_of, sums_part
from weft.cost.times import BorderTimes, StageTimes
from weft.cost.timing import WEFT, Hardware, Software, stage_times
from weft.cost.traffic import Fabric
from weft.cost.work import StageWork, layers_by_kind, width_of
from weft.models.registry import param_specs, shape_of
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec, UnitName
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.simulate.play import Timeline, simulate_plan

GFLOPS = 50.0
"""Of a chip of speed 1: about what one core of a server multiplies in fp32 while it trains."""
_FLOPS_A_BYTE = 5.0
"""Of large products in the time in which a core moves a byte from and to its memory."""


@lru_cache(maxsize=256)
def core(gflops: float = GFLOPS) -> Roofline:
    """A core, or a part of one, that does so many 10^9 FLOP/s."""
    rate = gflops * 1e9
    return Roofline(
        flops_s=rate,
        fp8_flops_s=rate,
        fp32_flops_s=rate,
        attention_flops_s=rate,
        bytes_s=rate / _FLOPS_A_BYTE,
        unaligned=1.0,
        launch_s=0.0,
    )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One step."""

    pipelines: tuple[Timeline, ...]
    busy: tuple[float, ...]
    """By rank: part of the step in which it computes."""
    exchange_s: float
    """How long gradients travel where no computation hides them."""
    update_s: float
    """How long the slowest rank's optimizer takes."""
    alone_s: float
    """What the step would take if the chips shared the work as their speeds are, for nothing."""

    @property
    def compute_s(self) -> float:
        """Until the slowest pipeline has ended."""
        return max(timeline.step_s for timeline in self.pipelines)

    @property
    def least_s(self) -> float:
        """The step, where gradients cost nothing."""
        return self.compute_s + self.update_s

    @property
    def most_s(self) -> float:
        """The step, where nothing hides them."""
        return self.least_s + self.exchange_s

    @property
    def efficiency(self) -> tuple[float, float]:
        """Part of the sum of the chips' speeds that is used, at worst and at best."""
        return self.alone_s / self.most_s, self.alone_s / self.least_s

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "predicted": True,
            "compute_s": self.compute_s,
            "exchange_s": self.exchange_s,
            "update_s": self.update_s,
            "pipeline_s": [timeline.step_s for timeline in self.pipelines],
            "bubble": [timeline.bubble for timeline in self.pipelines],
            "busy": list(self.busy),
            "efficiency": list(self.efficiency),
        }


@dataclass(frozen=True)
class VirtualCluster:
    """A job on a cluster: how long each part of it takes."""

    plan: Plan
    spec: ModelSpec
    seq_len: int
    cluster: ClusterFile
    gflops: float = GFLOPS
    """10^9 floating-point operations a second of a chip of speed 1."""

    def __post_init__(self) -> None:
        if self.plan.world_size != self.cluster.world_size:
            expected = f"{self.cluster.world_size} ranks, one a chip of the cluster"
            hint = "Change its shares or stages."
            raise ConfigError("plan", self.plan.world_size, expected, hint)

    def predict(self) -> Prediction:
        """Play one step."""
        plan = self.plan
        timelines = []
        for pipeline in plan.pipelines:
            numbers = range(len(pipeline.stages))
            stages = [self._stage(pipeline, number) for number in numbers]
            borders = [self.border(pipeline, number) for number in numbers[:-1]]
            timelines.append(simulate_plan(pipeline, stages, borders))
        updates = self.update_s()
        step = max(timeline.step_s for timeline in timelines) + max(updates)
        busy = list(updates)
        for pipeline, timeline in zip(plan.pipelines, timelines, strict=True):
            for here, seconds in zip(pipeline.positions(), timeline.busy_s, strict=True):
                computes = seconds * self._computing(pipeline, here)
                ranks = pipeline.stages[here[0]].mesh.ranks
                own = {r: sum(self._own_s(pipeline, number, r) for number in here) for r in ranks}
                for rank in ranks:
                    busy[rank] += computes * own[rank] / (max(own.values()) or 1.0)
        return Prediction(
            pipelines=tuple(timelines),
            busy=tuple(seconds / step for seconds in busy),
            exchange_s=self._exchange_s(),
            update_s=max(updates),
            alone_s=self._alone_s(),
        )

    def layers(self, pipeline: PipelinePlan, number: int, rank: int) -> list[StageTimes]:
        """Of a full microbatch on one rank of a stage, with its own samples, layer by layer.

        The embedding is the first stage's first layer, the head the last one's last; of a layer
        that the plan cuts anywhere each part is one.
        """
        free = Hardware(
            chip=core(self.gflops * self._speed(rank)),
            fabric=links_among(LinkEntry(), Group(1)),
            software=Software(),
        )
        each = by_layer(choice_of(pipeline, number, self.seq_len, rank=rank), self.plan.cuts)
        return [stage_times(shape_of(self.spec), layer, free) for layer in each]

    def _own_s(self, pipeline: PipelinePlan, number: int, rank: int) -> float:
        """What one rank computes of a full microbatch."""
        return sum(times.whole_s for times in self.layers(pipeline, number, rank))

    def said(self, pipeline: PipelinePlan, number: int) -> list[StageTimes]:
        """Of a full microbatch: what a stage's ranks wait for inside its layers, layer by layer."""
        stage, choice = pipeline.stages[number], choice_of(pipeline, number, self.seq_len)
        shape, wider = shape_of(self.spec), width_of(stage.precision) / choice.work.wide
        found = []
        for each in by_layer(choice, self.plan.cuts):
            seconds = 0.0
            for (experts, branch), _ in layers_by_kind(shape, each.work.layers):
                for send in layer_sends(shape, each.work, experts=experts, branch=branch):
                    links = links_among(self.link(ranks_of(send, stage.mesh)), send.group)
                    seconds += wider * choice.passes * send.seconds(links)
            again = seconds * each.work.forward_again
            found.append(
                StageTimes(forward_s=seconds, input_grad_s=seconds + again, weight_grad_s=0.0)
            )
        return found

    def border(self, pipeline: PipelinePlan, number: int) -> BorderTimes:
        """Between a stage and the next; each sender carries its part of a microbatch."""
        one, other = pipeline.stages[number], pipeline.stages[number + 1]
        link = self.link((one.mesh.ranks[-1], other.mesh.ranks[0]))
        fabric = links_among(link, Group(2))
        sizes = pipeline.microbatch, self.seq_len, self.spec.d_model
        return border_times(
            border_bytes(one.precision, *sizes, cast=one.border),
            [1 / len(stage.mesh.ranks) for stage in (one, other)],
            (fabric, fabric),
            reach="across",
        )

    def gradient_bytes(self) -> list[int]:
        """Of the embedding, every layer or part of one, and the head, in the format in which they
        are summed."""
        return [self.gradient_width * unit.numel for unit in self._units()]

    @property
    def gradient_width(self) -> int:
        """Bytes of an element in which gradients are summed."""
        return max(4, *(width_of(stage.precision) for _, _, stage in self.plan.stages()))

    def _units(self) -> Iterator[_Unit]:
        """The embedding, every layer, in its parts where the plan cuts it, and the head."""
        sizes: Counter[UnitName] = Counter()
        units: list[UnitName] = ["embed", *self.plan.places, "head"]
        for param in param_specs(self.spec):
            cut = param.places.intersection(self.plan.cuts)
            sizes[next(iter(cut), param.unit)] += param.numel
        for unit in units:
            held = [stage for _, _, stage in self.plan.stages_with({unit})]
            yield _Unit(sizes[unit], held, sum(stage.mesh.sample_ways for stage in held))

    def update_s(self) -> list[float]:
        """By rank: how long its optimizer takes, for what it owns."""
        spent = [0.0] * self.plan.world_size
        for unit in self._units():
            ways = {rank: each for near, each in self._domains(unit) for rank in near}
            for stage in unit.held:
                for rank in stage.mesh.ranks:
                    owned = unit.numel / _split(stage.mesh) / (ways[rank] if stage.zero else 1)
                    chip = core(self.gflops * self._speed(rank))
                    spent[rank] += chip.moving_seconds(WEFT.optimizer_bytes * owned)
        return spent

    def _domains(self, unit: _Unit) -> list[tuple[Sequence[int], int]]:
        """The ranks of each domain that hold a unit, and how many of them hold the same."""
        split = min(_split(stage.mesh) for stage in unit.held)
        domains = self.plan.by_domain({rank for stage in unit.held for rank in stage.mesh.ranks})
        if len(domains) == 1:
            return [(domains[0], unit.ways)]
        return [(near, max(len(near) // split, 1)) for near in domains]

    def with_ends(self) -> Plan:
        """The plan of a model whose first and last layer are the embedding and the head."""
        pipelines = []
        for pipeline in self.plan.pipelines:
            last = len(pipeline.stages) - 1
            stages = []
            for number, stage in enumerate(pipeline.stages):
                first, end = stage.layers
                layers = (first + (number > 0), end + 1 + (number == last))
                stages.append(replace(stage, layers=layers))
            pipelines.append(replace(pipeline, stages=tuple(stages)))
        return replace(self.plan, num_layers=self.plan.num_layers + 2, pipelines=tuple(pipelines))

    def link(self, ranks: Sequence[int]) -> LinkEntry:
        """The slowest link on the way among ranks, and how late it is."""
        return slowest_of(self._link(*pair) for pair in combinations(ranks, 2))

    def _stage(self, pipeline: PipelinePlan, number: int) -> StageTimes:
        """As slow as the slowest of its ranks."""
        ranks = pipeline.stages[number].mesh.ranks
        slowest = max(ranks, key=lambda rank: self._own_s(pipeline, number, rank))
        each = self.layers(pipeline, number, slowest) + self.said(pipeline, number)
        return StageTimes(
            forward_s=sum(times.forward_s for times in each),
            input_grad_s=sum(times.input_grad_s for times in each),
            weight_grad_s=sum(times.weight_grad_s for times in each),
        )

    def _computing(self, pipeline: PipelinePlan, stages: Sequence[int]) -> float:
        """Part of a position's time in which it computes, and does not wait for its peers."""
        whole = sum(self._stage(pipeline, number).whole_s for number in stages)
        said = sum(times.whole_s for number in stages for times in self.said(pipeline, number))
        return 1 - said / whole if whole else 0.0

    def _alone_s(self) -> float:
        """The whole batch, and one update, on one chip as fast as all together."""
        speeds = sum(chip.speed for _, chip in self.cluster.by_rank)
        chip = core(self.gflops * speeds)
        seconds = 0.0
        for pipeline in self.plan.pipelines:
            work = StageWork(
                layers=(0, self.spec.num_layers),
                embeds=True,
                predicts=True,
                samples=pipeline.microbatch,
                seq_len=self.seq_len,
                dtype=dtype_of(pipeline.stages[0].precision),
            )
            whole = compute_seconds(shape_of(self.spec), work, chip).whole_s
            seconds += pipeline.samples * whole / pipeline.microbatch
        numel = sum(unit.numel for unit in self._units())
        return seconds + chip.moving_seconds(WEFT.optimizer_bytes * numel)

    def _exchange_s(self) -> float:
        """Gradients of one layer after another, around a ring of all that hold the layer: of all
        in a domain, where each rank then has its part of the sums to exchange with the others. All
        that one bucket carries goes round at once."""
        ranks = range(self.plan.world_size)
        spent, late, sent = ([0.0] * len(ranks) for _ in range(3))
        width = self.gradient_width
        for unit, num_bytes in zip(self._units(), self.gradient_bytes(), strict=True):
            own = num_bytes / min(_split(stage.mesh) for stage in unit.held)
            domains = self._domains(unit)
            many, link = len(domains), self._link_between([near for near, _ in domains])
            for near, ways in domains:
                far_s = sums_part(self.plan.sums, width) * byte_s(link) * 2 * (many - 1) / many
                around = self.link(near)
                round_s = byte_s(around) * 2 * (ways - 1) / ways
                late_s = 2 * (ways - 1) * around.latency_ms + 2 * link.latency_ms
                for rank in near:
                    spent[rank] += own * (round_s + far_s / ways)
                    late[rank] += own * late_s / 1e3
                    sent[rank] += own
        return max(spent[n] + late[n] / min(max(sent[n], 1.0), BUCKET_BYTES) for n in ranks)

    def _link_between(self, domains: Sequence[Sequence[int]]) -> LinkEntry:
        """The slowest link from one domain to another."""
        pairs = (product(*both) for both in combinations(domains, 2))
        return slowest_of(self._link(*ranks) for ranks in chain.from_iterable(pairs))

    def _speed(self, rank: int) -> float:
        return self.cluster.by_rank[rank][1].speed

    def _link(self, one: int, other: int) -> LinkEntry:
        """The slowest link on the way from one rank to another."""
        here, there = (self.cluster.by_rank[rank][0] for rank in (one, other))
        if here == there:
            return LinkEntry()
        inside, between = self.cluster.links.inside, self.cluster.links.between
        if any(here in node and there in node for node in self.cluster.nodes):
            return inside
        rates = [link.gbit for link in (inside, between) if link.gbit is not None]
        late = inside.latency_ms + between.latency_ms
        return LinkEntry(gbit=min(rates, default=None), latency_ms=late)


class _Unit(NamedTuple):
    """Parameters of the embedding, a layer or the head, and the stages that hold them."""

    numel: int
    held: list[StagePlan]
    ways: int
    """How many ranks hold each of them."""


def _split(mesh: Mesh) -> int:
    """Parts into which each layer's parameters are divided."""
    return len(mesh.ranks) // mesh.sample_ways


def slowest_of(links: Iterable[LinkEntry]) -> LinkEntry:
    """As slow as the slowest, and as late as what is latest."""
    every = [*links]
    rates = [link.gbit for link in every if link.gbit is not None]
    late = max((link.latency_ms for link in every), default=0.0)
    return LinkEntry(gbit=min(rates, default=None), latency_ms=late)


def byte_s(link: LinkEntry) -> float:
    """Seconds that a link takes for a byte."""
    return 0.0 if link.gbit is None else 8 / (link.gbit * 1e9)


def links_among(link: LinkEntry, group: Group) -> Fabric:
    """Links that are all alike, of ranks who pass parts round a ring."""
    rate, late_s = inf if link.gbit is None else 1 / byte_s(link), link.latency_ms / 1e3
    return Fabric(
        chips_per_node=group.size,
        inside_bytes_s=rate,
        across_bytes_s=rate,
        inside_latency_s=late_s,
        across_latency_s=late_s,
        exchange_bytes_s=rate,
        exchange_latency_s=(group.size - 1) * late_s,
    )

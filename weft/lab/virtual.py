"""Virtual chips: what a step would take on a cluster, computed and not run.

Chips compute as many floating-point operations a second as their speed says, and links carry what
they are said to carry. Memory, caches, kernels, data and the optimizer's update are left out: good
for comparing plans and shares, not for a promise in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.cluster.cluster_file import ClusterFile, LinkEntry
from weft.config.errors import ConfigError
from weft.cost.flops import forward_flops_per_token
from weft.models.registry import FAMILIES
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.simulate.play import simulate_plan
from weft.simulate.timeline import Timeline
from weft.simulate.times import SeamTimes, StageTimes

GFLOPS = 50.0
"""Of a chip of speed 1: about what one core of a server multiplies in fp32."""
_WIDTH = {"fp64": 8, "fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One step."""

    pipelines: tuple[Timeline, ...]
    busy: tuple[float, ...]
    """By rank: part of the step in which it computes."""
    exchange_s: float
    """How long gradients travel where no computation hides them."""
    alone_s: float
    """What the step would take if the chips shared the work as their speeds are, for nothing."""

    @property
    def compute_s(self) -> float:
        """Until the slowest pipeline has ended: the step, where gradients cost nothing."""
        return max(timeline.step_s for timeline in self.pipelines)

    @property
    def efficiency(self) -> tuple[float, float]:
        """Part of the sum of the chips' speeds that is used, at worst and at best."""
        return self.alone_s / (self.compute_s + self.exchange_s), self.alone_s / self.compute_s

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "predicted": True,
            "compute_s": self.compute_s,
            "exchange_s": self.exchange_s,
            "pipeline_s": [timeline.step_s for timeline in self.pipelines],
            "bubble": [timeline.bubble for timeline in self.pipelines],
            "busy": list(self.busy),
            "efficiency": list(self.efficiency),
        }


def predict(
    plan: Plan, spec: ModelSpec, seq_len: int, cluster: ClusterFile, *, gflops: float = GFLOPS
) -> Prediction:
    """Play one step of a plan on a cluster, a rank a chip in the order of the file.

    Raises:
        ConfigError: the plan has more or fewer ranks than the cluster has chips.
    """
    if plan.world_size != cluster.world_size:
        expected = f"{cluster.world_size} ranks, one a chip of the cluster"
        raise ConfigError("plan", plan.world_size, expected, "Change its shares or stages.")
    model = _Model(spec, seq_len, cluster, gflops * 1e9)
    timelines = [model.play(pipeline) for pipeline in plan.pipelines]
    step = max(timeline.step_s for timeline in timelines)
    busy = dict.fromkeys(range(plan.world_size), 0.0)
    for pipeline, timeline in zip(plan.pipelines, timelines, strict=True):
        for stages, seconds in zip(pipeline.positions(), timeline.busy_s, strict=True):
            busy |= dict.fromkeys(pipeline.stages[stages[0]].mesh.ranks, seconds / step)
    flops = 3 * forward_flops_per_token(spec, seq_len) * seq_len * plan.global_batch
    speeds = sum(chip.speed for _, chip in cluster.seats)
    return Prediction(
        pipelines=tuple(timelines),
        busy=tuple(busy[rank] for rank in range(plan.world_size)),
        exchange_s=model.exchange_s(plan),
        alone_s=flops / (speeds * gflops * 1e9),
    )


@dataclass(frozen=True)
class _Model:
    spec: ModelSpec
    seq_len: int
    cluster: ClusterFile
    rate: float
    """Floating-point operations a second of a chip of speed 1."""

    def play(self, pipeline: PipelinePlan) -> Timeline:
        stages = [self._stage(pipeline, number) for number in range(len(pipeline.stages))]
        pairs = zip(pipeline.stages, pipeline.stages[1:], strict=False)
        seams = [self._seam(one, other, pipeline.microbatch) for one, other in pairs]
        return simulate_plan(pipeline, stages, seams)

    def _stage(self, pipeline: PipelinePlan, number: int) -> StageTimes:
        """As slow as the slowest of its ranks."""
        stage = pipeline.stages[number]
        head = 2 * self.spec.d_model * self.spec.vocab_size
        layers = forward_flops_per_token(self.spec, self.seq_len) - head
        flops = layers / self.spec.num_layers * (stage.layers[1] - stage.layers[0])
        flops += head if number == len(pipeline.stages) - 1 else 0
        flops /= stage.mesh.size("tp")
        forward = max(
            len(samples) * self.seq_len * flops / (self._speed(rank) * self.rate)
            for rank, samples in pipeline.split(number, 0).items()
        )
        again = forward if stage.recompute == "full" else 0.0
        return StageTimes(forward_s=forward, input_grad_s=forward + again, weight_grad_s=forward)

    def _seam(self, one: StagePlan, other: StagePlan, samples: int) -> SeamTimes:
        link = self._link(one.mesh.ranks[-1], other.mesh.ranks[0])
        sent = samples * self.seq_len * self.spec.d_model * _WIDTH[one.precision]
        return SeamTimes(transfer_s=_seconds(sent, link), latency_s=link.latency_ms / 1e3)

    def exchange_s(self, plan: Plan) -> float:
        """All gradients in fp32, around a ring of all that hold the same layers."""
        copies = sum(p.stages[0].mesh.size("dp") for p in plan.pipelines)
        if copies == 1:
            return 0.0
        numbers = sum(param.numel for param in FAMILIES[self.spec.family].param_specs(self.spec))
        sent = 2 * (copies - 1) / copies * numbers * 4
        ranks = range(plan.world_size)
        links = [self._link(one, other) for one in ranks for other in ranks if one < other]
        return max(_seconds(sent, link) for link in links)

    def _speed(self, rank: int) -> float:
        return self.cluster.seats[rank][1].speed

    def _link(self, one: int, other: int) -> LinkEntry:
        """The slowest link on the way from one rank to another."""
        here, there = (self.cluster.seats[rank][0] for rank in (one, other))
        if here == there:
            return LinkEntry()
        inside, between = self.cluster.links.inside, self.cluster.links.between
        if any(here in node and there in node for node in self.cluster.nodes):
            return inside
        rates = [link.gbit for link in (inside, between) if link.gbit is not None]
        late = inside.latency_ms + between.latency_ms
        return LinkEntry(gbit=min(rates, default=None), latency_ms=late)


def _seconds(num_bytes: float, link: LinkEntry) -> float:
    return 0.0 if link.gbit is None else num_bytes * 8 / (link.gbit * 1e9)

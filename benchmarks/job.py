"""A job as published tables describe it: degrees of parallelism instead of a plan.

One pipeline of stages on like chips, with the closed forms of its schedule; a plan goes through
``memory_of_plan`` and ``weft.simulate`` instead. Both ask the same functions about a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Literal

from weft.cluster.cluster import Dtype
from weft.cost.choice import Group, StageChoice
from weft.cost.memory import Memory, Overheads, stage_memory
from weft.cost.times import StageTimes
from weft.cost.timing import Hardware, stage_times
from weft.cost.traffic import Fabric
from weft.cost.work import BF16_STATE, StageWork, StateBytes, dividing
from weft.models.shape import ModelShape
from weft.plan.plan import ZeroLevel
from weft.precision.roles import Tier
from weft.recompute.asked import Slabs

BORDERS = 2
"""Tensors of a border's size that other software holds: what comes, and what goes."""
JobSchedule = Literal["1f1b", "zb-h1", "zb-h2"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Everything about a run that its time and memory depend on, the chips apart."""

    shape: ModelShape
    seq_len: int
    global_batch: int
    microbatch: int = 1
    """Samples on one rank."""
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    chunks: int = 1
    """Stages of one position: above 1 the pipeline is interleaved."""
    schedule: JobSchedule = "1f1b"
    zero: ZeroLevel = 0
    shard_ways: int = 0
    """Ranks that share what ``zero`` names; 0 is all that hold the same."""
    recompute: Slabs = ()
    sequence_parallel: bool = True
    dtype: Dtype = "bf16"
    fused_attention: bool = True
    frozen: bool = False
    tier: Tier = "device"
    """Where what only updates need is kept."""
    splits: tuple[int, ...] = ()
    """First layer of every stage but the first; empty splits them alike."""

    @property
    def num_microbatches(self) -> int:
        """On one rank, in one step."""
        return max(-(-self.global_batch // (self.microbatch * self.dp)), 1)

    def choices(self, state: StateBytes = BF16_STATE) -> list[StageChoice]:
        """Of every position, all its stages together."""
        bounds = [0, *(self.splits or self._even()), self.shape.num_layers]
        return [self._choice(bounds, position, state) for position in range(self.pp)]

    def works(self) -> list[StageWork]:
        """What one rank of every position computes."""
        return [choice.work for choice in self.choices()]

    def _even(self) -> list[int]:
        """Layers by position; those left over go to the middle, for the ends have tables."""
        base, rest = divmod(self.shape.num_layers, self.pp)
        first = (self.pp - rest + 1) // 2
        counts = [base + (first <= p < first + rest) for p in range(self.pp)]
        return [sum(counts[:p]) for p in range(1, self.pp)]

    def _choice(self, bounds: list[int], position: int, state: StateBytes) -> StageChoice:
        sizes = {"dp": self.dp, "cp": self.cp, "experts": self.ep, "tp": self.tp}
        axes = tuple((name, size) for name, size in sizes.items() if size > 1)
        return StageChoice(
            work=StageWork(
                layers=(bounds[position], bounds[position + 1]),
                embeds=position == 0,
                predicts=position == self.pp - 1,
                samples=self.microbatch,
                seq_len=self.seq_len,
                axes=dividing(axes),
                sequence_parallel=self.sequence_parallel,
                recompute=self.recompute,
                dtype=self.dtype,
                fused_attention=self.fused_attention,
                frozen=self.frozen,
            ),
            axes=axes,
            zero=self.zero,
            shard_ways=self.shard_ways,
            state=state,
            tier=self.tier,
            # Of microbatches between the end of a chunk and of the next one.
            overlap=1 + self.pp * (1 - 1 / self.chunks),
        )

    def alike(self, choice: StageChoice) -> StageChoice:
        """Equal for stages that cost the same."""
        if self.shape.experts is not None:
            return choice
        work = choice.work._replace(layers=(0, choice.work.num_layers))
        return choice._replace(work=work)

    def held(self, position: int) -> float:
        """Microbatches whose results a position keeps at its peak."""
        many = self.num_microbatches
        if self.schedule == "zb-h2":  # its limit, which every position uses (arXiv 2401.10241)
            return min(many, 2 * self.pp)
        if self.schedule == "zb-h1":
            return min(many, self.pp)
        if self.chunks == 1:
            return min(many, self.pp - position)
        ahead = 2 * (self.pp - position - 1) + (self.chunks - 1) * self.pp + 1
        return min(many * self.chunks, ahead) / self.chunks


def memory_of_job(job: Job, state: StateBytes, overheads: Overheads) -> list[Memory]:
    """By position: one rank's memory."""
    result = []
    known: dict[tuple[StageChoice, float], Memory] = {}
    for position, choice in enumerate(job.choices(state)):
        held, alike = job.held(position), job.alike(choice)
        if (alike, held) not in known:
            known[alike, held] = stage_memory(job.shape, alike, overheads).holding(held, BORDERS)
        result.append(known[alike, held])
    return result


def step_seconds_of_job(job: Job, by_position: Sequence[Hardware]) -> float:
    """One step: the pipeline, and what is done once.

    ``by_position``: of every position, or one for all.
    """
    shape, choices = job.shape, job.choices()
    known: dict[tuple[StageChoice, Hardware], StageTimes] = {}
    everywhere = list(by_position) * (job.pp // len(by_position))
    times = []
    for choice, hardware in zip(choices, everywhere, strict=True):
        alike = job.alike(choice)
        if (alike, hardware) not in known:
            known[alike, hardware] = stage_times(shape, alike, hardware)
        times.append(known[alike, hardware])
    border = 0.0
    if job.pp > 1:
        stride = job.tp * job.cp * job.dp
        narrowest = min(
            (hardware.fabric for hardware in by_position), key=lambda one: one.across_bytes_s
        )
        transfer, latency = border_seconds(shape, choices[0].work, narrowest, stride=stride)
        border = 2 * (transfer + latency)
    pipeline = pipeline_seconds(
        times,
        num_microbatches=job.num_microbatches,
        schedule=job.schedule,
        chunks=job.chunks,
        border_s=border,
        border_hidden=by_position[0].software.border_hidden,
    )
    tail = max(times[end].update_s for end in (0, job.pp - 1))
    ranks = job.dp * job.tp * job.pp * job.cp
    return (pipeline + tail) * (1 + by_position[0].software.straggle * log2(ranks))


def border_seconds(
    shape: ModelShape, work: StageWork, fabric: Fabric, *, stride: int
) -> tuple[float, float]:
    """(transfer, latency) of one microbatch between two stages: the residual, split over ``tp``."""
    group = Group(2, stride)
    inside = fabric.stays_inside(group)
    latency = fabric.inside_latency_s if inside else fabric.across_latency_s
    part = 2 * work.rows * shape.d_model
    return fabric.seconds("send", part, group) - latency, latency


def pipeline_seconds(
    stages: list[StageTimes],
    *,
    num_microbatches: int,
    schedule: JobSchedule = "1f1b",
    chunks: int = 1,
    border_s: float = 0.0,
    border_hidden: float = 1.0,
) -> float:
    """Until the last backward has ended: the slowest stage's work, and the way to it and back.

    ``border_s``: there and back across one border. ``border_hidden``: part of it behind computing
    once the pipeline is full.
    """
    steady = [stage.whole_s + border_s * chunks * (1 - border_hidden) for stage in stages]
    slowest = max(range(len(stages)), key=steady.__getitem__)
    others = [stage for number, stage in enumerate(stages) if number != slowest]
    match schedule:
        case "1f1b":
            way = sum(stage.whole_s for stage in others) / chunks
        case "zb-h1":
            way = sum(max(s.forward_s + s.input_grad_s - s.weight_grad_s, 0.0) for s in others)
        case "zb-h2":
            way = 0.0
    return num_microbatches * steady[slowest] + way + border_s * (len(stages) - 1)

"""What a plan will do on a cluster: time, memory, traffic, energy and money, and what limits it.

Pure: no device, no clock, no file. Ranks of one position are alike, so ten thousand of them are a
few dozen rows. Time and memory are those that the search compares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, sqrt

from weft.cluster.cluster import Chip, Dtype
from weft.cluster.view import ClusterView, Reach
from weft.config.errors import ConfigError
from weft.cost.choice import choice_of
from weft.cost.flops import train_flops_per_token
from weft.cost.memory import Memory
from weft.cost.operators import PHASES, stage_ops
from weft.cost.rates import CostFunction, compute_seconds
from weft.cost.sent import Way
from weft.cost.work import width_of
from weft.models.registry import shape_of
from weft.plan.plan import PipelinePlan, Plan, Precision
from weft.planner.problem import Problem, Workload
from weft.simulate.step import StepTime

WAITING = 0.35
"""Part of a chip's power while it waits for others. Assumed: its clocks and its memory stay up.
While it computes, a chip takes the power of its data sheet."""

JOULES_PER_BYTE: Mapping[Reach, float] = {
    "node": 80e-12,
    "across": 800e-12,
    "sites": 800e-12,
}
"""Of a byte on its way, orders of magnitude from data sheets of links, not measured; hosts, cooling
and storage are left out. Inside a node 10 pJ a bit: serial links on a board, switch included.
Between nodes 100 pJ a bit: two adapters of 25 W and four optical ends of 12 W at 400 Gbit/s, and a
switch; between sites no more, for what lies between them is left out."""


def traffic_joules(sent: Mapping[Way, float]) -> float:
    """Of all bytes on their way."""
    return sum(JOULES_PER_BYTE[way.reach] * num_bytes for way, num_bytes in sent.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionMemory:
    """What ranks of one mesh of a pipeline hold, with its stages."""

    pipeline: int
    stages: tuple[int, ...]
    chip: Chip
    """Of a rank that has least room left."""
    ranks: tuple[int, ...]
    memory: Memory
    """Of that rank."""
    by_chip: Mapping[str, int]
    """How many ranks have which chip, by its name."""

    @property
    def chips(self) -> str:
        """``8 x H100-SXM5-80GB``; of several kinds each."""
        return chips_in_words(self.by_chip)


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionForecast:
    """One mesh of a pipeline with its stages: ranks that do the same."""

    pipeline: int
    stages: tuple[int, ...]
    chip: Chip
    """Of a rank that has least room left."""
    ranks: tuple[int, ...]
    precision: Precision
    computing_s: float
    """In a step, recomputation included."""
    communicating_s: float
    """Inside the layers, as far as nothing hides it."""
    once_s: float
    """What the pipeline does at the end of a step: exchange, update, publish."""
    waiting_s: float
    """For other stages, other pipelines and the last of many ranks."""
    by_memory: float
    """Part of the computing time that goes with the memory's rate, not with arithmetic."""
    memory: Memory
    """Of the rank that has least room left."""
    kinds: tuple[tuple[Chip, int, float], ...]
    """Of its ranks: each chip, how many have it, and the part of ``computing_s`` that they
    compute."""

    @property
    def memory_part(self) -> float:
        """Of the chip's memory that is used."""
        return self.memory.total / (self.chip.memory_gib * 2**30)

    @property
    def chips(self) -> str:
        """``8 x H100-SXM5-80GB``; of several kinds each."""
        of: Counter[str] = Counter()
        for chip, number, _ in self.kinds:
            of[chip.name] += number
        return chips_in_words(of)

    @property
    def words(self) -> str:
        """``stage 1 of pipeline 0 (8 x H100-SXM5-80GB)``."""
        many = len(self.stages) > 1
        numbers = " and ".join(map(str, self.stages))
        return f"stage{'s' * many} {numbers} of pipeline {self.pipeline} ({self.chips})"

    def as_json(self) -> dict[str, object]:
        """Which it is, as ``--json`` prints it."""
        return {
            "pipeline": self.pipeline,
            "stages": list(self.stages),
            "chip": " + ".join(dict.fromkeys(chip.name for chip, _, _ in self.kinds)),
            "num_ranks": len(self.ranks),
        }


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One step of a plan on a cluster."""

    plan: Plan
    problem: Problem
    time: StepTime
    exchange_s: float
    """Of the slowest pipeline's ``once_s``: what goes over links."""
    positions: tuple[PositionForecast, ...]
    sent: Mapping[Way, float]
    """Bytes of all ranks."""

    @property
    def step_s(self) -> float:
        return self.time.step_s

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.plan.global_batch * self.problem.workload.seq_len

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @cached_property
    def mfu(self) -> float:
        """Model FLOPs (forward and twice that for backward, nothing recomputed) of a step over
        what the chips of the plan could do meanwhile at their printed peak in its precision."""
        work = self.problem.workload
        flops = train_flops_per_token(work.spec, work.seq_len) * self.tokens
        peak = sum(
            number * peak_flops(chip, position.precision, tf32=self.problem.knowledge.tf32)
            for position in self.positions
            for chip, number, _ in position.kinds
        )
        return flops / (peak * self.step_s)

    @cached_property
    def energy_j(self) -> float | None:
        """Of all chips and links; None where a chip's power is not known."""
        total = traffic_joules(self.sent)
        for position in self.positions:
            seconds = position.computing_s + position.communicating_s
            seconds += position.once_s + position.waiting_s
            for chip, number, part in position.kinds:
                if chip.power_w is None:
                    return None
                computing = part * position.computing_s
                full_s = computing + WAITING * (seconds - computing)
                total += number * (chip.power_w * full_s)
        return total

    @property
    def price(self) -> float | None:
        """Of all chips of the problem, used or not, for they are hired: in the currency of the
        cluster's file; None where a chip's is not known."""
        total = 0.0
        for pool in self.problem.cluster.pools:
            if pool.price_per_hour is None:
                return None
            total += pool.num_chips * (pool.price_per_hour * self.step_s / 3600)
        return total

    @property
    def joules_per_token(self) -> float | None:
        return None if self.energy_j is None else self.energy_j / self.tokens

    @property
    def price_per_million_tokens(self) -> float | None:
        return None if self.price is None else self.price / self.tokens * 1e6

    @property
    def slowest(self) -> PositionForecast:
        """Of the pipeline that all wait for, the position that works longest."""
        both = zip(self.time.timelines, self.time.once_s, strict=True)
        ends = [timeline.step_s + once for timeline, once in both]
        mine = [p for p in self.positions if p.pipeline == ends.index(max(ends))]
        return max(mine, key=lambda position: position.computing_s + position.communicating_s)

    @property
    def fullest(self) -> PositionForecast:
        """The position whose chips have least room left."""
        return max(self.positions, key=lambda position: position.memory_part)

    def memory_by_rank(self) -> list[Memory]:
        """In the order of ranks."""
        found = self.problem.memory(self.plan)
        return [found[rank] for rank in sorted(found)]


def memory_by_position(plan: Plan, problem: Problem) -> list[PositionMemory]:
    """Memory alone: it takes no rates of the chips."""
    memory = problem.memory(plan)
    return [
        PositionMemory(
            pipeline=number,
            stages=stages,
            chip=problem.cluster.pool_of(first).chip,
            ranks=stage.mesh.ranks,
            memory=memory[first],
            by_chip=_by_chip(stage.mesh.ranks, problem.cluster),
        )
        for number, pipeline in enumerate(plan.pipelines)
        for stages in pipeline.positions()
        for stage in [pipeline.stages[stages[0]]]
        for first in [problem.fullest(stage, memory)]
    ]


def forecast(plan: Plan, problem: Problem, *, time: StepTime | None = None) -> Forecast:
    """Predict one step.

    Args:
        time: Of this plan, if it is known already.

    Raises:
        ConfigError: the plan needs a rank, or a rate, that is not known.
    """
    time, memory = time or problem.time(plan), problem.memory(plan)
    free = problem.with_links(inf, inf).time(plan)
    positions = []
    for number, pipeline in enumerate(plan.pipelines):
        played, alone = time.timelines[number], free.timelines[number]
        busy = zip(pipeline.positions(), played.busy_s, alone.busy_s, strict=True)
        for stages, busy_s, computing_s in busy:
            stage, once = pipeline.stages[stages[0]], time.once_s[number]
            first = problem.fullest(stage, memory)
            pool = problem.cluster.pool_of(first)
            chip = problem.knowledge.hardware_of(pool).chip
            positions.append(
                PositionForecast(
                    pipeline=number,
                    stages=stages,
                    chip=pool.chip,
                    ranks=stage.mesh.ranks,
                    precision=stage.precision,
                    computing_s=computing_s,
                    communicating_s=max(busy_s - computing_s, 0.0),
                    once_s=once,
                    waiting_s=max(time.step_s - busy_s - once, 0.0),
                    by_memory=_by_memory(pipeline, stages, problem.workload, chip),
                    memory=memory[first],
                    kinds=tuple(_kinds(pipeline, stages, problem)),
                )
            )
    return Forecast(
        plan=plan,
        problem=problem,
        time=time,
        exchange_s=max(time.once_s) - max(free.once_s),
        positions=tuple(positions),
        sent=problem.sent(plan),
    )


def _kinds(
    pipeline: PipelinePlan, stages: tuple[int, ...], problem: Problem
) -> Iterator[tuple[Chip, int, float]]:
    """Of a position's ranks: those of a pool alike where they have no weights of samples; else
    each by itself."""
    stage, work = pipeline.stages[stages[0]], problem.workload
    every = problem.cluster.by_pool(stage.mesh.ranks)
    if stage.is_uneven:
        every = [(pool, [rank]) for pool, ranks in every for rank in ranks]
    shape = shape_of(work.spec)
    took = []
    for pool, (rank, *_) in every:
        cost = problem.knowledge.hardware_of(pool).chip
        each = (choice_of(pipeline, number, work.seq_len, rank=rank).work for number in stages)
        took.append(sum(compute_seconds(shape, part, cost).whole_s for part in each))
    for (pool, ranks), seconds in zip(every, took, strict=True):
        yield pool.chip, len(ranks), seconds / (max(took) or 1.0)  # stages without layers


def _by_chip(ranks: Sequence[int], cluster: ClusterView) -> Counter[str]:
    found: Counter[str] = Counter()
    for pool, some in cluster.by_pool(ranks):
        found[pool.chip.name] += len(some)
    return found


def chips_in_words(by_chip: Mapping[str, int]) -> str:
    """``8 x H100-SXM5-80GB + 8 x A100-SXM4-80GB``."""
    return " + ".join(f"{number} x {name}" for name, number in by_chip.items())


def peak_dtype(chip: Chip, precision: Precision, *, tf32: bool) -> Dtype | None:
    """Whose printed rate is the peak in a plan's precision: fp16 and bf16 count alike, and fp32
    where there is neither; ``tf32``: that in place of fp32. None: none is known."""
    order: tuple[Dtype, ...] = ("fp32", "bf16", "fp16")
    if width_of(precision) == 2:
        order = ("bf16", "fp16", "fp32")
    found = next((dtype for dtype in order if chip.peak_flops(dtype)), None)
    return "tf32" if found == "fp32" and tf32 and chip.peak_flops("tf32") else found


def peak_flops(chip: Chip, precision: Precision, *, tf32: bool = False) -> float:
    """Printed FLOP/s in a plan's precision; ``tf32``: fp32 multiplies so where it can."""
    dtype = peak_dtype(chip, precision, tf32=tf32)
    found = dtype and chip.peak_flops(dtype)
    if not found:
        raise ConfigError(f"chip {chip.name}: peak_tflops", None, "a positive number for bf16")
    return found


def _by_memory(
    pipeline: PipelinePlan, stages: tuple[int, ...], workload: Workload, chip: CostFunction
) -> float:
    """A kernel whose bytes take longer than its arithmetic counts as memory's, as a whole."""
    shape = shape_of(workload.spec)
    total = bound = 0.0
    for number in stages:
        work = choice_of(pipeline, number, workload.seq_len).work
        for op, times in stage_ops(shape, work):
            for phase in PHASES:
                seconds = times * chip.seconds(op, phase, work.dtype)
                moving = times * chip.moving_seconds(op.phase_bytes(phase))
                total += seconds
                bound += seconds if moving > seconds / sqrt(2) else 0.0
    return bound / total if total else 0.0

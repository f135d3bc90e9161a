"""Play a plan on virtual chips: one real process a chip, which sleeps instead of computing.

The schedule, the messages and the gradient path are the trainer's own; only time is modelled, so
what is measured is what executor and transports add to it. Nothing is trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from math import ceil
from statistics import median

from weft.comm.members import Channel
from weft.cost.sends import sums_part
from weft.cost.times import BorderTimes
from weft.elastic.pool import ANSWER_S, WorkerPool
from weft.parallel.buckets import BUCKET_BYTES
from weft.parallel.pipeline.stage_border import channel
from weft.plan.borders import in_parts
from weft.virtual.predicted import Prediction, VirtualCluster, byte_s
from weft.virtual.rank import Times, VirtualJob, run_steps
from weft.virtual.sleeping import LEAST_NUMEL, LayerTimes, Links

STEPS = 3
"""Counted, after one to warm up."""
_STEP_S = 2.0
"""How long a played step takes at least: shorter, and what processes do besides sleeping counts."""
_SLEEP_S = 0.01
"""How long one sleep takes on average, for the same reason."""
_NUMEL = 1 << 18
"""Of all parameters together as they really travel: 2 MiB."""
_GRAIN = 64


@dataclass(frozen=True, kw_only=True)
class Played:
    """What was measured, in modelled seconds."""

    step_s: float
    """The middle one of the counted steps."""
    spread: float
    """(longest - shortest) / middle."""
    busy: tuple[float, ...]
    """By rank: part of the step in which its chip computed."""
    efficiency: float
    """Part of what the chips' speeds add up to."""
    slower: float
    """Modelled seconds played in one real second, inverted: 2 takes twice as long."""


def play(virtual: VirtualCluster, prediction: Prediction) -> Played:
    """Run the plan's real schedule with real messages, a process a chip."""
    num_ranks = virtual.plan.world_size
    most = max(_sleeps(virtual, rank) for rank in range(num_ranks))
    slower = max(_STEP_S, most * _SLEEP_S) / prediction.compute_s
    job = virtual_job(virtual, slower)
    timeout_s = ANSWER_S + (STEPS + 1) * 2 * prediction.most_s * slower
    with WorkerPool() as pool:
        found = pool.run(run_steps, [job], STEPS, world_size=num_ranks, timeout_s=timeout_s)
    ranks: list[list[Times]] = [rank[0] for rank in found]
    steps = [max(times.step_s for times in step) for step in zip(*ranks, strict=True)]
    middle = median(steps)
    return Played(
        step_s=middle / slower,
        spread=(max(steps) - min(steps)) / middle,
        busy=tuple(median(times.busy_s for times in rank) / middle for rank in ranks),
        efficiency=prediction.alone_s * slower / middle,
        slower=slower,
    )


def _sleeps(virtual: VirtualCluster, rank: int) -> int:
    """How often a rank sleeps in a step: forward and twice backward, each layer."""
    rank_plan = virtual.with_ends().rank_plan(rank)
    stages = [rank_plan.pipeline_plan.stages[number] for number in rank_plan.stages]
    layers = sum(len(in_parts(stage.layers, rank_plan.plan.cuts)) for stage in stages)
    return 3 * layers * rank_plan.pipeline_plan.num_microbatches


def virtual_job(virtual: VirtualCluster, slower: float = 1.0) -> VirtualJob:
    """What the ranks are told. Everything takes ``slower`` times as long as modelled."""
    # Messages carry moments in time, which need all the digits of fp64. What a stage does beside
    # gathering and talking is in its times already.
    plan = virtual.with_ends().each(
        lambda stage: replace(stage, precision="fp64", recompute="off", compile=False, passes=1)
    )
    sizes = virtual.gradient_bytes()
    shrink = sum(sizes) / (8 * _NUMEL)
    width = max(len(s.mesh.ranks) // s.mesh.sample_ways for _, _, s in plan.stages())
    least = LEAST_NUMEL * width
    return VirtualJob(
        plan=plan,
        times={(p, s): _times(virtual, p, s, slower) for p, s, _ in plan.stages()},
        update_s={rank: slower * each for rank, each in enumerate(virtual.update_s())},
        numels=[max(least, _GRAIN * ceil(size / 8 / shrink / _GRAIN)) for size in sizes],
        bucket_bytes=max(8 * least, int(BUCKET_BYTES / shrink)),
        links=_links(virtual, slower, shrink),
        width=width,
    )


def _times(
    virtual: VirtualCluster, number: int, stage: int, slower: float
) -> dict[int, list[LayerTimes]]:
    """Of one sample, by rank of a stage and by layer."""
    pipeline = virtual.plan.pipelines[number]
    mesh = pipeline.stages[stage].mesh
    shares = pipeline.stages[stage].sample_shares
    part = slower / max(map(len, mesh.split_samples(pipeline.microbatch, shares).values()))
    return {
        rank: [
            LayerTimes(computing.scaled(part), waiting.scaled(part))
            for computing, waiting in zip(
                virtual.layers(pipeline, stage, rank), virtual.said(pipeline, stage), strict=True
            )
        ]
        for rank in mesh.ranks
    }


def _links(virtual: VirtualCluster, slower: float, shrink: float) -> Links:
    borders: dict[Channel, BorderTimes] = {}
    for pipeline in virtual.plan.pipelines:
        for number in range(len(pipeline.stages) - 1):
            border = virtual.border(pipeline, number)
            slow = replace(
                border,
                transfer_s=border.transfer_s * slower,
                latency_s=border.latency_s * slower,
            )
            borders[channel(pipeline, number, "F")] = slow
            borders[channel(pipeline, number, "B")] = slow
    pairs = {
        pair: byte_s(virtual.link(pair)) * slower * shrink
        for pair in combinations(range(virtual.plan.world_size), 2)
    }
    late = {pair: virtual.link(pair).latency_ms / 1e3 * slower for pair in pairs}
    sums = sums_part(virtual.plan.sums, virtual.gradient_width)
    return Links(borders=borders, pairs=pairs, late=late, sums=sums)

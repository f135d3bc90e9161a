"""Play a plan on virtual chips: one real process a chip, which sleeps instead of computing.

The schedule, the messages and the gradient path are the trainer's own; only time is modelled, so
what is measured is what executor and transports add to it. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import ceil
from statistics import median
from typing import Any

from weft.comm.members import Channel
from weft.cost.times import SeamTimes, StageTimes
from weft.elastic.pool import WorkerPool
from weft.parallel.buckets import BUCKET_BYTES
from weft.parallel.pipeline.stage_border import channel
from weft.virtual.predicted import Prediction, VirtualCluster, byte_s
from weft.virtual.rank import StageKey, Times, VirtualJob, run_steps
from weft.virtual.sleeping import LEAST_NUMEL, Links

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

    def as_json(self) -> dict[str, Any]:
        """Beside the prediction's."""
        return {
            "step_s": self.step_s,
            "spread": self.spread,
            "busy": list(self.busy),
            "efficiency": self.efficiency,
            "slower": self.slower,
        }


def play(virtual: VirtualCluster, prediction: Prediction) -> Played:
    """Run the plan's real schedule with real messages, a process a chip."""
    plan = virtual.plan
    most = max(_sleeps(virtual, rank) for rank in range(plan.world_size))
    slower = max(_STEP_S, most * _SLEEP_S) / prediction.compute_s
    job = virtual_job(virtual, slower)
    real_s = (STEPS + 1) * 2 * prediction.most_s * slower
    with WorkerPool() as pool:
        ranks = pool.run(
            run_steps, [job], STEPS, world_size=plan.world_size, timeout_s=120 + real_s
        )
    return _played([rank[0] for rank in ranks], slower, prediction.alone_s)


def _played(ranks: Sequence[Sequence[Times]], slower: float, alone_s: float) -> Played:
    steps = [max(times.step_s for times in step) for step in zip(*ranks, strict=True)]
    middle = median(steps)
    busy = (median(times.busy_s for times in rank) / middle for rank in ranks)
    return Played(
        step_s=middle / slower,
        spread=(max(steps) - min(steps)) / middle,
        busy=tuple(busy),
        efficiency=alone_s * slower / middle,
        slower=slower,
    )


def _sleeps(virtual: VirtualCluster, rank: int) -> int:
    """How often a rank sleeps in a step: forward and twice backward, each layer."""
    seat = virtual.with_ends().seat(rank)
    stages = [seat.pipeline_plan.stages[number] for number in seat.stages]
    layers = sum(stage.layers[1] - stage.layers[0] for stage in stages)
    return 3 * layers * seat.pipeline_plan.num_microbatches


def virtual_job(virtual: VirtualCluster, slower: float = 1.0) -> VirtualJob:
    """What the ranks are told. Everything takes ``slower`` times as long as modelled."""
    # Messages carry moments in time, which need all the digits of fp64.
    plan = virtual.with_ends().each(lambda stage: replace(stage, precision="fp64"))
    sizes = virtual.gradient_bytes()
    shrink = sum(sizes) / (8 * _NUMEL)
    width = max(len(s.mesh.ranks) // s.mesh.sample_ways for _, _, s in plan.stages())
    least = LEAST_NUMEL * width
    numels = [max(least, _GRAIN * ceil(size / 8 / shrink / _GRAIN)) for size in sizes]
    updates = dict(enumerate(slower * seconds for seconds in virtual.update_s()))
    return VirtualJob(
        plan=plan,
        times=_times(virtual, slower),
        said=_said(virtual, slower),
        update_s=updates,
        numels=numels,
        bucket_bytes=max(8 * least, int(BUCKET_BYTES / shrink)),
        links=_links(virtual, slower, shrink),
        width=width,
    )


def _times(virtual: VirtualCluster, slower: float) -> dict[StageKey, dict[int, list[StageTimes]]]:
    found: dict[StageKey, dict[int, list[StageTimes]]] = {}
    for p, s, stage in virtual.plan.stages():
        pipeline = virtual.plan.pipelines[p]
        samples = ceil(pipeline.microbatch / stage.mesh.sample_ways)
        found[p, s] = {
            rank: [times.scaled(slower / samples) for times in virtual.layers(pipeline, s, rank)]
            for rank in stage.mesh.ranks
        }
    return found


def _said(virtual: VirtualCluster, slower: float) -> dict[StageKey, list[StageTimes]]:
    found: dict[StageKey, list[StageTimes]] = {}
    for p, s, stage in virtual.plan.stages():
        pipeline = virtual.plan.pipelines[p]
        samples = ceil(pipeline.microbatch / stage.mesh.sample_ways)
        found[p, s] = [times.scaled(slower / samples) for times in virtual.said(pipeline, s)]
    return found


def _links(virtual: VirtualCluster, slower: float, shrink: float) -> Links:
    seams: dict[Channel, SeamTimes] = {}
    for pipeline in virtual.plan.pipelines:
        for number in range(len(pipeline.stages) - 1):
            seam = virtual.seam(pipeline, number)
            slow = SeamTimes(transfer_s=seam.transfer_s * slower, latency_s=seam.latency_s * slower)
            seams[channel(pipeline, number, "F")] = slow
            seams[channel(pipeline, number, "B")] = slow
    pairs = {
        pair: byte_s(virtual.link(pair)) * slower * shrink
        for pair in combinations(range(virtual.plan.world_size), 2)
    }
    return Links(seams=seams, pairs=pairs)

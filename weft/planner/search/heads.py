"""The head's rows over several positions: the best few plans that a search found, with its parts.

A search leaves the head whole, on the last position. Where chips are unlike it can be more than the
last one's part of the work. Then borders move until, with rows of the head for whoever has time
left, all positions compute as long as one another; what comes of that is played like any plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import gcd

from weft.cost.choice import choice_of
from weft.cost.timing import stage_times
from weft.models.registry import FAMILIES, head_rows_of, shape_of
from weft.plan.borders import INSIDE, Place
from weft.plan.plan import PipelinePlan, Plan
from weft.plan.tiling import split_by_weight
from weft.planner.heads import check_heads
from weft.planner.problem import Problem
from weft.planner.search.finer import MOST_MOVES, MOST_STAGES, Pace, better, every_move, paces_of
from weft.planner.search.found import Candidate
from weft.planner.stages import head_part
from weft.schedules.registry import SCHEDULES

LEAST = 0.03
"""Part of the head below which a position gets none."""
GRAIN = 128
"""Rows that stay together where the vocabulary has whole ones: products like such sizes."""
DEEPER = (0, 1, 2)
"""More microbatches in flight on each position, which hide the way to the parts and back."""


def with_head_parts(candidates: Sequence[Candidate], problem: Problem) -> Iterator[Candidate]:
    """Those of the candidates that are faster with parts of the head, and fit."""
    rows = head_rows_of(problem.workload.spec)
    for candidate in candidates if problem.options.divides_heads and rows else ():
        plan, there = candidate.plan, problem.on(candidate.cluster)
        ends = (
            line.step_s + once
            for line, once in zip(candidate.time.timelines, candidate.time.once_s, strict=True)
        )
        _, number = max((end, n) for n, end in enumerate(ends))
        if _can_have(plan, plan.pipelines[number]):
            found = better(candidate, number, there, _divided(plan, number, there, rows))
            if found is not None:
                check_heads(found.plan, rows)
                yield found


def _can_have(plan: Plan, pipeline: PipelinePlan) -> bool:
    """What parts of a head ask of a plan (``weft.planner.heads``), and one stage a position."""
    stages = pipeline.stages
    several = 1 < len(stages) == len(pipeline.positions()) <= MOST_STAGES
    casts = any(stage.border for stage in stages)
    cut = any(stage.mesh.size("cp") > 1 for stage in stages)
    unlike = plan.domains or plan.has_unlike_state
    return several and not (casts or cut or unlike)


def _divided(plan: Plan, number: int, problem: Problem, rows: int) -> Iterator[PipelinePlan]:
    """One pipeline after each of the moves that lower the level which all positions come to."""
    pipeline, paces = plan.pipelines[number], paces_of(plan, number, problem)
    whole = _whole_heads(pipeline, problem)
    paces[-1] = replace(paces[-1], rest=max(paces[-1].rest - whole[-1], 0.0))
    cuts = problem.options.cuts_layers and FAMILIES[problem.workload.spec.family].parts
    size: Place = INSIDE if cuts or plan.cuts else 1
    ends: list[Place] = [0, *(stage.layers[1] for stage in pipeline.stages)]
    least = float("inf")
    for _ in range(MOST_MOVES):
        level, parts = _level(paces, whole, ends)
        if level >= least:
            return
        least = level
        yield from _planned(pipeline, ends, parts, rows)
        others = every_move(ends, {0, len(pipeline.stages) - 1}, size)
        ends = min(others, key=lambda ends: _level(paces, whole, ends)[0], default=ends)


def _whole_heads(pipeline: PipelinePlan, problem: Problem) -> list[float]:
    """Seconds of the whole head for one microbatch, by position."""
    shape, found = shape_of(problem.workload.spec), []
    for number, stage in enumerate(pipeline.stages):
        hardware = problem.knowledge.hardware_of(problem.cluster.pool_of(stage.mesh.ranks[0]))
        choice = choice_of(pipeline, number, problem.workload.seq_len)
        head = choice.holding((0, 0), embeds=False, predicts=1.0)
        found.append(stage_times(shape, head, hardware).whole_s)
    return found


def _level(
    paces: Sequence[Pace], whole: Sequence[float], ends: Sequence[Place]
) -> tuple[float, list[float]]:
    """How long the slowest position computes, with the part of the head for each that makes this
    least: whoever has less to do than the level is filled up to it."""
    loads = [pace.of(layers) for pace, layers in zip(paces, pairwise(ends), strict=True)]
    level, speed, done = 0.0, 0.0, 0.0
    for load, head in sorted(zip(loads, whole, strict=True)):
        if speed and (1 + done) / speed <= load:
            break
        speed, done = speed + 1 / head, done + load / head
        level = (1 + done) / speed
    parts = [max(level - load, 0.0) / head for load, head in zip(loads, whole, strict=True)]
    return max(level, *loads), parts


def _planned(
    pipeline: PipelinePlan, ends: Sequence[Place], parts: Sequence[float], rows: int
) -> Iterator[PipelinePlan]:
    """With these borders and parts, and with more microbatches in flight."""
    grain, kept = gcd(rows, GRAIN), [part if part >= LEAST else 0.0 for part in parts]
    sizes = split_by_weight(rows // grain, [round(1e4 * part) for part in kept])
    if len(sizes) - sizes.count(0) < 2:  # whole, where it was or elsewhere
        return
    both = zip(pipeline.stages, pairwise(ends), strict=True)
    stages = [replace(stage, layers=layers) for stage, layers in both]
    held = pairwise(accumulate((size * grain for size in sizes), initial=0))
    heads = [
        head_part(stage, ends[-1], (low, high))
        for stage, (low, high) in zip(stages, held, strict=True)
        if low < high
    ]
    made = replace(pipeline, stages=(*stages, *heads), in_flight=(), lists=())
    many, meshes = pipeline.num_microbatches, len(stages)
    for more in DEEPER if SCHEDULES[made.schedule].deeper else (0,):
        deep = tuple(min(many, n + more) for n in range(meshes, 0, -1))
        yield replace(made, in_flight=deep if more else ())

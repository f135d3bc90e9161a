"""Borders moved into layers: the best few plans that a search found, refined by half a layer.

A search divides whole layers. Half a layer more or less on one chip evens out what chips of unlike
speeds, or heads beside layers, leave uneven. Moves are chosen by how long each mesh computes, and
what comes of them is played like any other plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

from weft.cost.choice import choice_of, ways_of_domains
from weft.cost.timing import stage_times
from weft.models.registry import FAMILIES, shape_of
from weft.plan.borders import INSIDE, Layers, Place, place
from weft.plan.plan import PipelinePlan, Plan
from weft.planner.problem import Problem
from weft.planner.search.domains import have_room
from weft.planner.search.found import Candidate

ENOUGH = 0.005
"""Part of a step that it has to save; less no prediction can tell."""
MOST_STAGES = 32
"""Of a pipeline: with more, half a layer is little, and there are too many moves."""
MOST_MOVES = 12
"""Halves of layers that go from a stage to another."""
_SHARP = 16
"""Exponent of the norm over meshes that moves make smaller: the slowest counts most, and among
equally slow ones each counts."""


def with_finer_borders(candidates: Sequence[Candidate], problem: Problem) -> list[Candidate]:
    """The candidates, with borders inside layers where that saves time and their chips have
    room."""
    parts = FAMILIES[problem.workload.spec.family].parts
    if not problem.options.cuts_layers or parts is None:
        return list(candidates)
    return [_refined(candidate, problem.on(candidate.cluster)) for candidate in candidates]


def _refined(candidate: Candidate, problem: Problem) -> Candidate:
    """Its pipelines, the slowest first, as long as that saves time."""
    best = candidate
    for _ in candidate.plan.pipelines:
        both = zip(best.time.timelines, best.time.once_s, strict=True)
        ends = [timeline.step_s + once for timeline, once in both]
        slowest = ends.index(max(ends))
        found = better(best, slowest, problem, _moved(best.plan, slowest, problem))
        if found is None:
            break
        best = found
    return best


def better(
    candidate: Candidate, number: int, problem: Problem, others: Iterable[PipelinePlan]
) -> Candidate | None:
    """The best with another pipeline in one's place; None where nothing saves enough."""
    plan, best = candidate.plan, None
    enough = (1 - ENOUGH) * candidate.time.step_s
    for pipeline in others:
        pipelines = (*plan.pipelines[:number], pipeline, *plan.pipelines[number + 1 :])
        other = replace(plan, pipelines=pipelines)
        time = problem.time(other)
        if time.step_s < enough:
            memory = problem.memory(other)
            if have_room(other, problem, memory):
                enough = time.step_s
                best = replace(candidate, plan=other, time=time, memory=memory)
    return best


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of one stage for one microbatch, by what it has."""

    rest: float
    """Whatever layers it has."""
    first: float
    """Of the first part of a layer."""
    second: float

    def of(self, layers: Layers) -> float:
        begin, end = (round(at / INSIDE) for at in layers)
        firsts = (end + 1) // 2 - (begin + 1) // 2
        return self.rest + firsts * self.first + (end - begin - firsts) * self.second


def _moved(plan: Plan, number: int, problem: Problem) -> Iterator[PipelinePlan]:
    """One pipeline after each of the moves that even out its meshes most."""
    pipeline = plan.pipelines[number]
    many = len(pipeline.stages)
    if not 1 < many <= MOST_STAGES:
        return
    paces = paces_of(plan, number, problem)
    positions = pipeline.positions()
    empty = {n for n, stage in enumerate(pipeline.stages) if not stage.blocks}

    def uneven(ends: Sequence[Place]) -> float:
        seconds = [pace.of(layers) for pace, layers in zip(paces, pairwise(ends), strict=True)]
        return sum(sum(seconds[n] for n in stages) ** _SHARP for stages in positions)

    ends: list[Place] = [0, *(stage.layers[1] for stage in pipeline.stages)]
    least = uneven(ends)
    for _ in range(MOST_MOVES):
        others = [*every_move(ends, {0, many - 1, *empty})]
        chosen = min(others, key=uneven, default=ends)
        if uneven(chosen) >= least * (1 - ENOUGH):
            return
        ends, least = chosen, uneven(chosen)
        stages = (
            replace(stage, layers=layers)
            for stage, layers in zip(pipeline.stages, pairwise(ends), strict=True)
        )
        yield replace(pipeline, stages=tuple(stages))


def every_move(
    ends: Sequence[Place], may_be_empty: set[int], size: Place = INSIDE
) -> Iterator[list[Place]]:
    """Half a layer, or ``size``, from a stage to another: all borders between them move."""
    for giver, taker in permutations(range(len(ends) - 1), 2):
        step = size if giver > taker else -size
        between = range(min(giver, taker) + 1, max(giver, taker) + 1)
        moved = [place(at + step) if n in between else at for n, at in enumerate(ends)]
        left = moved[giver + 1] - moved[giver]
        if left > 0 or (left == 0 and giver in may_be_empty):
            yield moved


def paces_of(plan: Plan, number: int, problem: Problem) -> list[Pace]:
    """By stage. Ranks of a search's meshes are alike."""
    pipeline, shape = plan.pipelines[number], shape_of(problem.workload.spec)
    middle = shape.dense_layers
    times, _ = problem.times(plan)[number]
    ways, found = ways_of_domains(plan), []
    for s, stage in enumerate(pipeline.stages):
        hardware = problem.knowledge.hardware_of(problem.cluster.pool_of(stage.mesh.ranks[0]))
        beside = len(plan.pipelines), problem.workload.training, ways[number, s]
        choice = choice_of(pipeline, s, problem.workload.seq_len, *beside)
        halves = (
            choice.holding(layers, embeds=False, predicts=False)
            for layers in ((middle, middle + INSIDE), (middle + INSIDE, middle + 1))
        )
        first, second = (stage_times(shape, half, hardware).whole_s for half in halves)
        none = Pace(0.0, first, second)
        found.append(replace(none, rest=times[s].whole_s - none.of(stage.layers)))
    return found

"""More microbatches in flight before slow borders, for the best plans that a search found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft.plan.plan import PipelinePlan, Plan
from weft.planner.problem import Problem
from weft.planner.search.domains import have_room
from weft.planner.search.found import Candidate
from weft.schedules.registry import SCHEDULES

BEST_FEW = 3
"""Plans for which it is tried."""
WORTH = 1e-3
"""Part of a step that it must save."""
MOST_TRIES = 64
"""Of a plan: each plays its whole step."""


def with_more_in_flight(candidates: Sequence[Candidate], problem: Problem) -> list[Candidate]:
    """The candidates, fastest first; the best few with as many microbatches in flight as save time
    and as their chips have room for."""
    if not problem.options.in_flight:
        return list(candidates)
    found = [
        _deepened(candidate, problem.on(candidate.cluster)) if number < BEST_FEW else candidate
        for number, candidate in enumerate(candidates)
    ]
    return sorted(found, key=lambda candidate: candidate.time.step_s)


def _deepened(candidate: Candidate, problem: Problem) -> Candidate:
    """One more before the border where that saves most, as long as it does."""
    best, tries = candidate, 0
    while tries < MOST_TRIES:
        plans = list(_one_more(best.plan))
        tries += len(plans)
        timed = [(problem.time(plan), plan) for plan in plans]
        worth = [each for each in timed if each[0].step_s < (1 - WORTH) * best.time.step_s]
        for time, plan in sorted(worth, key=lambda each: each[0].step_s):
            memory = problem.memory(plan)
            if have_room(plan, problem, memory):
                best = replace(best, plan=plan, time=time, memory=memory)
                break
        else:
            return best
    return best


def _one_more(plan: Plan) -> Iterator[Plan]:
    """The plan with one more in flight at all positions before one border of one pipeline."""
    for number, pipeline in enumerate(plan.pipelines):
        meshes = len(pipeline.positions())
        if SCHEDULES[pipeline.schedule].deeper is None:
            continue
        for border in range(1, meshes):
            deeper = _deeper(pipeline, meshes, border)
            if deeper is not None:
                before, after = plan.pipelines[:number], plan.pipelines[number + 1 :]
                yield replace(plan, pipelines=(*before, deeper, *after))


def _deeper(pipeline: PipelinePlan, meshes: int, border: int) -> PipelinePlan | None:
    """None where a step has no more microbatches."""
    most = pipeline.num_microbatches
    counts = pipeline.in_flight or tuple(min(most, meshes - p) for p in range(meshes))
    more = tuple(min(most, each + (place < border)) for place, each in enumerate(counts))
    return None if more == counts else replace(pipeline, in_flight=more)

"""Plans that divide the tokens of samples, with as many neighbours dividing heads instead in
attention as is fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

from weft.models.registry import dims_of_model
from weft.plan.plan import StagePlan
from weft.planner.problem import Problem
from weft.planner.search.choice import LONG
from weft.planner.search.domains import have_room
from weft.planner.search.found import Candidate
from weft.planner.validate import least_heads


def by_heads(candidate: Candidate, problem: Problem) -> Candidate:
    """The candidate, or it with the ways of dividing heads that save most and fit."""
    return min(_tried(candidate, problem.on(candidate.cluster)), key=lambda each: each.time.step_s)


def _tried(candidate: Candidate, problem: Problem) -> Iterator[Candidate]:
    yield candidate
    stages = [stage for _, _, stage in candidate.plan.stages()]
    least = cache(partial(least_heads, dims_of_model(problem.workload.spec)))
    for ways in range(2, max(map(_most, stages)) + 1):
        plan = candidate.plan.each(partial(_divided, ways))
        here = [stage for _, _, stage in plan.stages() if stage.head_ways > 1]
        if not here or any(ways > least(stage.mesh) for stage in here):
            continue
        memory = problem.memory(plan)
        if have_room(plan, problem, memory):
            yield replace(candidate, plan=plan, time=problem.time(plan), memory=memory)


def _most(stage: StagePlan) -> int:
    return max(stage.mesh.size(name) for name in LONG)


def _divided(ways: int, stage: StagePlan) -> StagePlan:
    return stage if _most(stage) % ways else replace(stage, head_ways=ways)

"""Plans whose ranks have other experts: tokens go in as many pieces and steps as is fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from weft.cluster.cluster import HOST
from weft.plan.plan import StagePlan
from weft.planner.experts import BY_EXPERTS, PIECES
from weft.planner.problem import Problem
from weft.planner.search.domains import have_room
from weft.planner.search.found import Candidate


def by_experts(candidate: Candidate, problem: Problem) -> Candidate:
    """The candidate, or it with the way of tokens to experts that saves most and fits."""
    return min(_tried(candidate, problem.on(candidate.cluster)), key=lambda each: each.time.step_s)


def _tried(candidate: Candidate, problem: Problem) -> Iterator[Candidate]:
    yield candidate
    for pieces, at_once in product(PIECES, (False, True)):
        plan = candidate.plan.each(partial(_sent, problem, pieces, at_once))
        if plan == candidate.plan:
            continue
        memory = problem.memory(plan)
        if have_room(plan, problem, memory):
            yield replace(candidate, plan=plan, time=problem.time(plan), memory=memory)


def _sent(problem: Problem, pieces: int, at_once: bool, stage: StagePlan) -> StagePlan:
    """Where cores that compute would also copy to each other, nothing is beside anything."""
    if stage.mesh.size(BY_EXPERTS) == 1:
        return stage
    ranks = next(stage.mesh.groups(BY_EXPERTS))
    is_far = not problem.cluster.share_a_node(ranks)
    many = pieces if is_far or stage.device != HOST else 1
    return replace(stage, expert_pieces=many, expert_ways=int(at_once and is_far))

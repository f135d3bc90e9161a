"""What a search keeps elsewhere, by stage: back on the device where that has room.

A search decides once for all stages where state and parameters wait, so that its bounds stay exact.
In a pipeline of unlike chips the small ones alone may need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from weft.plan.plan import Plan
from weft.planner.fit import shortages
from weft.planner.naming import name_of
from weft.planner.problem import Problem
from weft.planner.search.found import Candidate, Found

FEW = 3
"""Plans for which this is tried, the fastest."""


def nearer(found: Found, problem: Problem) -> Found:
    """What was found; of the best few each stage keeps as much as fits on its own device, as far as
    a problem leaves that open."""
    every = (found.best, *found.others)
    few = [_nearer(each, problem.on(each.cluster)) for each in every[:FEW]]
    best, *others = sorted([*few, *every[FEW:]], key=lambda each: each.time.step_s)
    return replace(found, best=best, others=tuple(others))


def _nearer(candidate: Candidate, problem: Problem) -> Candidate:
    plan = candidate.plan
    for ranks in dict.fromkeys(stage.mesh.ranks for _, _, stage in plan.stages()):
        for closer in (_closer(problem), _experts_closer(ranks, plan, problem)):
            every = (_with(tiers, ranks, plan) for tiers in closer)
            changed = (each for each in every if each != plan and not shortages(each, problem))
            plan = next(changed, plan)
    time = problem.time(plan)
    if plan == candidate.plan or time.step_s > candidate.time.step_s:
        return candidate
    name = name_of(plan, candidate.cluster)
    return replace(candidate, name=name, plan=plan, time=time, memory=problem.memory(plan))


def _closer(problem: Problem) -> Iterator[dict[str, Any]]:
    """What may be on the device of one mesh, most first: not state where an optimizer takes whole
    parameters, of all ranks at a time."""
    options, state, params = problem.options, {"state_tier": "device"}, {"param_tier": "device"}
    may_params = "device" in options.param_tiers
    may_state = "device" in options.tiers and problem.workload.training.by_element
    if may_params and may_state:
        yield state | params
    if may_params:
        yield params
    if may_state:
        yield state


def _experts_closer(ranks: Sequence[int], plan: Plan, problem: Problem) -> Iterator[dict[str, Any]]:
    """Experts of one mesh on the device, or of as many of its layers at a time as there is room."""
    mine = [stage for _, _, stage in plan.stages() if stage.mesh.ranks == ranks]
    if any(stage.expert_tier == "device" for stage in mine):
        return
    if "device" in problem.options.expert_tiers:
        yield {"expert_tier": "device"}
    most = max(len(stage.blocks) for stage in mine)
    yield from ({"expert_layers": many} for many in range(most, 2, -1))


def _with(tiers: dict[str, Any], ranks: Sequence[int], plan: Plan) -> Plan:
    """Of the stages of one mesh."""
    return plan.each(lambda s: replace(s, **tiers) if s.mesh.ranks == ranks else s)

"""Orders made for the stages that somebody asks for (``plan.schedule: made``). No torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from weft.config.sections import Config
from weft.plan.plan import Plan
from weft.planner.problem import Problem
from weft.planner.search import Candidate
from weft.planner.search.orders import with_made_orders
from weft.planner.stages import made_of
from weft.resolve.planned import options_asked
from weft.resolve.rank_chips import RankChips
from weft.resolve.resolve import Resolved
from weft.schedules.registry import by_preference


def with_orders(plan: Plan, problem: Problem, only: Collection[int] | None = None) -> Candidate:
    """The plan, each pipeline with the order that saves time; ``only``: of these numbers alone."""
    time, memory = problem.time(plan), problem.memory(plan)
    same = Candidate(name="", plan=plan, cluster=problem.cluster, time=time, memory=memory)
    return with_made_orders(same, problem, only)


def made_as_asked(plan: Plan, problem: Problem, config: Config) -> tuple[Plan, list[str]]:
    """The plan with the orders that a configuration asks for, and a sentence that says them."""
    numbers = made_of(config.plan)
    if not numbers:
        return plan, []
    options = replace(options_asked(config), schedules=by_preference())
    made = with_orders(plan, replace(problem, options=options), numbers)
    was_s, now_s = problem.time(plan).step_s, made.time.step_s
    words = ", ".join(dict.fromkeys(made.plan.pipelines[p].order for p in sorted(numbers)))
    gain = f"a step of {now_s:.3g} s by prediction, {was_s:.3g} s with the usual order"
    if made.plan == plan:
        gain = f"for no order that fits is predicted to save enough of {was_s:.3g} s a step"
    return made.plan, [f"plan.schedule = {words}: {gain}"]


def ordered(resolved: Resolved, chips: RankChips) -> Resolved:
    """A run with the orders that it asks for, made for these chips of its ranks."""
    config = resolved.config
    known = replace(chips.knowledge, tf32=config.compute.tf32)
    problem = Problem(resolved.workload, chips.view, known)
    plan, said = made_as_asked(resolved.plan, problem, config)
    way_out = ": run `weft chips profile`" if chips.is_guess else ""
    basis = f"plan.schedule takes rates from {'; '.join(chips.basis)}{way_out}"
    return replace(resolved, plan=plan, notes=(*resolved.notes, *said, basis))

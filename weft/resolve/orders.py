"""Orders made for the stages that somebody asks for (``plan.schedule: made``). No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest

from weft.config.sections import Config
from weft.plan.borders import Place, place
from weft.plan.plan import PipelinePlan, Plan, ScheduleName, StagePlan
from weft.planner.problem import Problem
from weft.planner.search import Candidate
from weft.planner.search.domains import have_room
from weft.planner.search.orders import with_made_orders
from weft.planner.stages import made_of
from weft.recompute.asked import offloads
from weft.resolve.planned import options_asked
from weft.resolve.rank_chips import RankChips
from weft.resolve.resolve import Resolved
from weft.schedules.registry import SCHEDULES, by_preference


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
    problem = replace(problem, options=options)
    laid = plan, *_laid_otherwise(plan, numbers)
    made = min(
        (with_orders(each, problem, numbers) for each in laid),
        key=lambda each: (not have_room(each.plan, problem, each.memory), each.time.step_s),
    )
    was_s, now_s = problem.time(plan).step_s, made.time.step_s
    words = ", ".join(dict.fromkeys(made.plan.pipelines[p].order for p in sorted(numbers)))
    gain = f"a step of {now_s:.3g} s by prediction, {was_s:.3g} s with the usual order"
    if not have_room(plan, problem, problem.memory(plan)):
        gain = f"a step of {now_s:.3g} s by prediction, the best for which there is room"
    if made.plan == plan:
        gain = f"for no order that fits is predicted to save enough of {was_s:.3g} s a step"
    return made.plan, [f"plan.schedule = {words}: {gain}"]


def _laid_otherwise(plan: Plan, numbers: Collection[int]) -> Iterator[Plan]:
    """The plan with the several stages of each mesh of these pipelines where other schedules have
    them: in a V instead of interleaved."""
    precisions = {stage.precision for _, _, stage in plan.stages()}
    if plan.casts and len(precisions) > 1:  # the way back may have nothing to save
        return
    seen = [[each.stages for each in plan.pipelines]]
    for name in by_preference():
        pipelines = tuple(
            _laid_by(name, each) if p in numbers else each for p, each in enumerate(plan.pipelines)
        )
        stages = [each.stages for each in pipelines]
        if stages not in seen:
            seen.append(stages)
            yield replace(plan, pipelines=pipelines)


def _laid_by(name: ScheduleName, pipeline: PipelinePlan) -> PipelinePlan:
    """Every mesh with as many layers in each of its stages, which are where a schedule has them;
    itself where that has other numbers of stages, or cannot do what they do."""
    known, places = SCHEDULES[name], pipeline.positions()
    idle = known.splits_backward and any(offloads(stage.recompute) for stage in pipeline.stages)
    if idle or known.chunks * len(places) != len(pipeline.stages):
        return pipeline
    placement = known.placement(len(places), len(pipeline.stages))
    moves = (zip(*both, strict=True) for both in zip(placement, places, strict=True))
    old = {to: pipeline.stages[number] for each in moves for to, number in each}
    stages = _joined([old[to] for to in range(len(old))], pipeline)
    return replace(pipeline, stages=tuple(stages), schedule=name)


def _joined(stages: Sequence[StagePlan], before: PipelinePlan) -> Iterator[StagePlan]:
    """Stages with layers that follow one another; between two meshes what crosses is cast as it was
    before."""
    casts = {frozenset((a.mesh, b.mesh)): a.border for a, b in pairwise(before.stages)}
    first: Place = 0
    for stage, after in zip_longest(stages, stages[1:]):
        end = place(first + stage.layers[1] - stage.layers[0])
        cast = "" if after is None else casts.get(frozenset((stage.mesh, after.mesh)), "")
        yield replace(stage, layers=(first, end), border=cast)
        first = end


def ordered(resolved: Resolved, chips: RankChips) -> Resolved:
    """A run with the orders that it asks for, made for these chips of its ranks."""
    config = resolved.config
    known = replace(chips.knowledge, tf32=config.compute.tf32)
    problem = Problem(resolved.workload, chips.view, known)
    plan, said = made_as_asked(resolved.plan, problem, config)
    way_out = ": run `weft chips profile`" if chips.is_guess else ""
    basis = f"plan.schedule takes rates from {'; '.join(chips.basis)}{way_out}"
    return replace(resolved, plan=plan, notes=(*resolved.notes, *said, basis))

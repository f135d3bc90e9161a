"""Orders made for plans that a search found: more microbatches in flight, or lists."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from weft.planner.fit import with_room_on_hosts
from weft.planner.problem import Problem
from weft.planner.search.domains import have_room
from weft.planner.search.found import Candidate
from weft.recompute.asked import offloads
from weft.schedules.known import Pattern, held_at_peak
from weft.schedules.registry import SCHEDULES
from weft.simulate.made.make import Making, make

ENOUGH = 0.02
"""Part of a step that another order has to save: less no prediction can tell, and a backward in
halves costs something that none has."""
BUDGET = 4_000
"""Actions that each search for a list does: where a step has many, rules do almost as well."""


def with_made_orders(
    candidate: Candidate,
    problem: Problem,
    only: Collection[int] | None = None,
    *,
    lists: bool = True,
) -> Candidate:
    """The candidate with orders for its pipelines that save most time in the room that their chips
    have: the slowest first, as long as that saves time, or a plan fits for which there was no room.
    None is made for parts of the head.

    Args:
        only: Numbers of the pipelines whose order may be another; None: all.
        lists: Off: schedules stay, with numbers in flight alone, which takes next to no time.
    """
    problem, best = problem.on(candidate.cluster), candidate
    if not problem.options.in_flight:
        return best
    for _ in candidate.plan.pipelines:
        both = zip(best.time.timelines, best.time.once_s, strict=True)
        ends = [timeline.step_s + once for timeline, once in both]
        slowest = ends.index(max(ends))
        if only is not None and slowest not in only:
            return best
        pipeline = best.plan.pipelines[slowest]
        if pipeline.heads:
            return best
        fits = have_room(best.plan, problem, best.memory)
        making = _making(best, slowest, problem, fits=fits)
        made = make(making if lists else replace(making, names=(pipeline.schedule,)))
        if made == pipeline:
            return best
        before, after = best.plan.pipelines[:slowest], best.plan.pipelines[slowest + 1 :]
        plan = replace(best.plan, pipelines=(*before, made, *after))
        time, memory = problem.time(plan), problem.memory(plan)
        saves = time.step_s < (1 - ENOUGH) * best.time.step_s
        if (fits and not saves) or not have_room(plan, problem, memory):
            return best
        best = replace(best, plan=plan, time=time, memory=memory)
    return best


def _making(candidate: Candidate, number: int, problem: Problem, *, fits: bool) -> Making:
    """``fits``: as many as it holds now may be held, whatever else is."""
    pipeline, names = candidate.plan.pipelines[number], problem.options.schedules
    if any(offloads(stage.recompute) for stage in pipeline.stages):  # halves need it again, later
        names = tuple(name for name in names if not SCHEDULES[name].splits_backward)
    stages, borders = problem.times(candidate.plan)[number]
    held = [sum(each) if fits else len(each) for each in held_at_peak(Pattern.of(pipeline))]
    both = problem.room(candidate.plan)[number], with_room_on_hosts(candidate.plan, number, problem)
    return Making(
        pipeline=pipeline,
        stages=stages,
        borders=borders,
        room=tuple(max(n, int(min(room))) for n, *room in zip(held, *both, strict=True)),
        names=names,
        budget=BUDGET,
        worth=ENOUGH,
    )

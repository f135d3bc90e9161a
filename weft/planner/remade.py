"""Orders made anew for other numbers of microbatches, from what a run has measured.

Nobody knows the links of a run as well as its stages: a border's length is the one with which the
order that was measured takes as long as it took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.cost.times import BorderTimes, StageTimes
from weft.plan.plan import PipelinePlan, Plan
from weft.schedules.known import Pattern, held_at_peak
from weft.schedules.registry import SCHEDULES, by_preference
from weft.simulate.made.make import Making, make

BUDGET = 4_000
"""As for the orders of a planner's best few: a second or so for long steps."""
HALVINGS = 20
"""Of the lengths that a border may have: to a millionth of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Of a pipeline."""

    seconds: float
    """Of all its forwards and backwards in a step, one after the other and beside one another."""
    stages: Sequence[StageTimes]


def without_orders(plan: Plan, first: Plan) -> Plan:
    """The plan without orders that are made anew: in the pipelines that have lists in ``first``."""
    both = zip(plan.pipelines, first.pipelines, strict=True)
    bare = (replace(p, in_flight=(), lists=()) if began.lists else p for p, began in both)
    return replace(plan, pipelines=tuple(bare))


def with_orders_anew(plan: Plan, before: Plan, first: Plan, measured: Sequence[Measured]) -> Plan:
    """The plan that was ``without_orders``, with orders made for its numbers; those of ``before``,
    of which everything was measured, where the numbers are the same.

    No pipeline holds more at once than it did in ``first``. The same on every rank.
    """
    pipelines = []
    for after, was, began, took in zip(
        plan.pipelines, before.pipelines, first.pipelines, measured, strict=True
    ):
        is_made = began.lists and after.samples != was.samples
        same = was if began.lists else after
        pipelines.append(_made(after, was, began, took) if is_made else same)
    return replace(plan, pipelines=tuple(pipelines))


def _made(
    after: PipelinePlan, was: PipelinePlan, began: PipelinePlan, took: Measured
) -> PipelinePlan:
    """Of the names that take backward apart as it does, and hold as little with more of them."""
    split = SCHEDULES[began.schedule].splits_backward
    alike = (name for name in by_preference() if SCHEDULES[name].splits_backward == split)
    making = Making(
        pipeline=was,
        stages=took.stages,
        borders=(),
        room=tuple(map(sum, held_at_peak(Pattern.of(began)))),
        names=tuple(name for name in alike if not SCHEDULES[name].holds_every_microbatch),
        budget=BUDGET,
    )
    borders = _borders(making, took.seconds)
    return make(replace(making, pipeline=after, borders=borders))


def _borders(making: Making, seconds: float) -> list[BorderTimes]:
    """Alike, so long that a step takes as long as it took."""
    low, high = 0.0, seconds
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        alike = [BorderTimes(transfer_s=middle)] * (len(making.stages) - 1)
        if replace(making, borders=alike).seconds(making.pipeline) > seconds:
            high = middle
        else:
            low = middle
    return [BorderTimes(transfer_s=low)] * (len(making.stages) - 1)

"""Orders made anew from what was measured: for other numbers, in the room of the first ones."""

import json
from dataclasses import replace
from math import inf

from made.instances import drawn

from weft.cost.times import BorderTimes
from weft.plan.plan import PipelinePlan, Plan
from weft.planner.remade import Measured, with_orders_anew, without_orders
from weft.planner.shares import shares_in_force, with_shares
from weft.schedules.known import Pattern, held_at_peak
from weft.schedules.registry import SCHEDULES, schedule_of
from weft.schedules.validity import prove
from weft.simulate.made.make import Making, make


def test_any_number_ends_in_the_room_of_the_first_and_is_found_again() -> None:
    """Nor is it slower than a name that fits, on borders whose length nobody said."""
    makings = [drawn(seed, positions=3, most=6) for seed in range(24)]
    assert sum(map(is_remade, makings)) >= 12


def is_remade(making: Making) -> bool:
    border = BorderTimes(transfer_s=max(each.transfer_s for each in making.borders))
    making = replace(making, borders=[border] * len(making.borders), budget=600)
    first, other = make(making), replace(making.pipeline, samples=9)
    if not first.lists:
        return False
    plan = Plan(num_layers=0, pipelines=(first, other))
    measured = [Measured(seconds=each, stages=making.stages) for each in (making.seconds(first), 1)]
    after = with_shares(without_orders(plan, plan), [first.samples + 2, other.samples - 2])
    found = with_orders_anew(after, plan, plan, measured)
    assert found == with_orders_anew(after, plan, plan, measured)
    assert found.pipelines[1] == after.pipelines[1], "it had no list"
    assert shares_in_force(plan, json.loads(found.to_json())) == found

    made = found.pipelines[0]
    prove(schedule_of(made), made.positions(), made.num_microbatches)
    assert fits(made, first)
    named = [replace(made, schedule=name, in_flight=(), lists=()) for name in making.alike()]
    seconds = [making.seconds(each) for each in named if fits(each, first)]
    assert making.seconds(made) <= min(seconds, default=inf) * 1.001
    return True


def fits(pipeline: PipelinePlan, first: PipelinePlan) -> bool:
    """It takes backward apart as the first does, and holds no more."""
    halves = {SCHEDULES[each.schedule].splits_backward for each in (pipeline, first)}
    both = [[sum(n) for n in held_at_peak(Pattern.of(each))] for each in (pipeline, first)]
    return len(halves) == 1 and all(now <= was for now, was in zip(*both, strict=True))

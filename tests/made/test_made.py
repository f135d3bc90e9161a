"""Lists made for a plan: they end, keep to the room, and are no slower than any that has a name."""

from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made.exhaustive import small_of
from made.instances import drawn
from schedules.test_schedules import held, pipeline
from simulate.test_simulate import Clock

from weft.cost.times import BorderTimes, StageTimes
from weft.plan.plan import PipelinePlan
from weft.schedules.registry import SCHEDULES, schedule_of
from weft.schedules.validity import prove
from weft.simulate.made.beam import Rule, follow
from weft.simulate.made.least import least_s
from weft.simulate.made.make import Making, make
from weft.simulate.play import simulate_plan

FORWARD_FIRST, BACKWARD_FIRST = Rule((0, 1, 2), 1.0), Rule((1, 0, 2), 0.0)
EVEN = StageTimes(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)
FREE = BorderTimes()
ALL = tuple(SCHEDULES)


def even(name: str, positions: int, many: int, room: tuple[int, ...]) -> Making:
    """Equal stages, and borders of no length."""
    plan = pipeline(name, positions, many)
    count = len(plan.stages)
    times = {"stages": [EVEN] * count, "borders": [FREE] * (count - 1)}
    return Making(pipeline=plan, room=room, names=ALL, **times)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_any_instance_ends_keeps_to_the_room_and_is_no_slower(seed: int) -> None:
    making = replace(drawn(seed, positions=4, most=8), budget=600)
    plan, before = make(making), making.pipeline
    schedule = schedule_of(plan)
    prove(schedule, plan.positions(), plan.num_microbatches)
    assert fits(plan, making.room)
    ended = Clock(schedule, making.stages, making.borders).run()
    step_s = max(end for _, end in ended.values())
    assert simulate_plan(plan, making.stages, making.borders).step_s == step_s
    assert bound(making) <= step_s * (1 + 1e-9)
    named = [replace(before, schedule=name) for name in making.alike()]
    for each in named:
        if fits(each, making.room):
            assert step_s <= simulate_plan(each, making.stages, making.borders).step_s


def bound(making: Making) -> float:
    """Below every order, backward whole or in halves."""
    return least_s(making.shop(making.room, split=True).tables())


def fits(plan: PipelinePlan, room: tuple[int, ...]) -> bool:
    lists = held(schedule_of(plan))
    return all(most <= least for most, least in zip(lists, room, strict=True))


def test_small_ones_are_nearly_as_good_as_the_best_of_all_orders() -> None:
    """Backward in halves, and whole."""
    distances = []
    for seed in range(60):
        making = drawn(seed, positions=3, most=4, shapes=("1f1b",))
        if seed % 3 == 0:
            making = replace(making, names=("1f1b", "gpipe"))
        small = small_of(making)
        found = making.seconds(make(making))
        least = small.shortest(int(found))
        distances.append(found / least - 1)
        own = [replace(border, is_shared=False) for border in making.borders]
        tables = replace(making, borders=own).shop(making.room, split=small.split).tables()
        assert least_s(tables) <= least
        if seed < 6:
            assert small.shortest(10**9) == least  # not only where it is told
    assert mean(distances) <= 0.01 and max(distances) <= 0.05


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_slow_border_bounds_every_order(is_shared: bool) -> None:
    """By hand: what goes down it, or by one port what goes both ways from the middle of three."""
    many, way = 4, BorderTimes(transfer_s=10.0, latency_s=5.0, is_shared=is_shared)
    making = even("1f1b", 3, many, (many,) * 3)
    making = replace(making, borders=[way, way])
    tables = making.shop(making.room, split=False).tables()
    there, back = 1 + 10 + 5, 2 + 10 + 5
    own = there + (1 + many * 10 + 5) + (1 + 2) + back + back
    port = there + (1 + 2 * many * 10 + 5) + 2  # the last goes up
    assert least_s(tables) == (max(own, port) if is_shared else own)
    whole = replace(making, names=("1f1b", "gpipe"))
    assert least_s(tables) <= whole.seconds(make(whole))


def test_many_microbatches_take_what_few_say() -> None:
    """Numbers in flight are compared by those; what is chosen is played whole."""
    errors, played = [], 0
    for seed in range(40):
        making = drawn(seed, positions=4, most=4, shapes=("1f1b",))
        places = len(making.room)
        in_flight = tuple(sorted((1 + (seed >> p) % 5 for p in range(places)), reverse=True))
        line = replace(making.pipeline, in_flight=in_flight)
        many = replace(line, samples=97 * line.microbatch)
        errors.append(abs(making.about(many) / making.seconds(many) - 1))
        assert making.about(line) == making.seconds(line)
        played = max(played, replace(making, pipeline=many).shorter().pipeline.num_microbatches)
    assert mean(errors) < 0.003 and max(errors) < 0.05 and played <= 12


@pytest.mark.parametrize(("positions", "many"), [(1, 3), (2, 5), (3, 8), (4, 4), (8, 16)])
def test_named_ones_are_special_cases(positions: int, many: int) -> None:
    """Of equal times and borders of no length: the same lists, by the rules and the room alone."""
    counts = tuple(range(positions, 0, -1))
    cases = [
        ("1f1b", BACKWARD_FIRST, counts, False),
        ("gpipe", FORWARD_FIRST, (many,) * positions, False),
    ]
    for name, rule, room, split in cases:
        making = even(name, positions, many, room)
        board = follow(making.shop(room, split=split).tables(), rule)
        assert board.lists() == schedule_of(making.pipeline), name


@pytest.mark.parametrize("name", ["zb-h1", "interleaved", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize(("positions", "many"), [(2, 8), (4, 8)])
def test_equal_times_leave_nothing_to_make(name: str, positions: int, many: int) -> None:
    """Of a name's placement, at the room that it takes: no search finds anything faster."""
    plan = pipeline(name, positions, many)
    making = replace(even(name, positions, many, held(schedule_of(plan))), budget=3000)
    assert make(making) == plan


@pytest.mark.parametrize("damage", ["one in flight too many", "one receive too early"])
def test_a_broken_generator_is_seen(damage: str) -> None:
    """By the same checks as above: the room that is kept, and a list that ends."""
    making = even("1f1b", 3, 6, (3, 2, 1))
    lists = [
        list(each)
        for each in follow(making.shop((3, 2, 1), split=False).tables(), BACKWARD_FIRST).lists()
    ]
    first = lists[0]
    if damage == "one in flight too many":
        backward = next(n for n, action in enumerate(first) if action.kind == "B")
        first.insert(backward, first.pop(backward + 1))
        prove(lists, making.pipeline.positions(), 6)
        assert held(lists)[0] == 4 > making.room[0]
    else:
        first.insert(0, first.pop(next(n for n, action in enumerate(first) if action.kind == "B")))
        with pytest.raises(ValueError, match=r"the schedule never ends: position 0 at B0\.0"):
            prove(lists, making.pipeline.positions(), 6)

"""What the search asks of one pipeline says the same as what users see, and its bounds hold."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from math import inf
from random import Random

import pytest
from planner.lines import CORE, H100, SCHEDULES, Drawn, drawn, long_drawn

from weft.cost.memory import memory_of_plan
from weft.plan.plan import ScheduleName
from weft.planner.search import route as route_module
from weft.planner.search.bounds import bounds_of
from weft.planner.search.choice import plan_of
from weft.planner.search.route import TOGETHER, Route, most_for
from weft.planner.search.splits import explore, has_place, splits
from weft.schedules.border_memory import borders_at_peak
from weft.schedules.known import Pattern, held_at_peak, schedule_of_pattern
from weft.schedules.notation import write

KINDS = {
    "bf16": {},
    "fp32": {"precision": "fp32"},
    "cores": {"chips": (CORE,), "precision": "fp32"},
    "cores with a GPU": {"chips": (CORE, H100)},
    "long": {"most_meshes": 7, "most_micros": 16},
}
DRAWS = 150
ROUNDING = 1e-12
"""Relative; the same sums in another order."""


def draws(kind: str, number: int = DRAWS) -> list[Drawn]:
    return [drawn(Random(seed), **KINDS[kind]) for seed in range(number)]


def shortest(route: Route, layers: Sequence[int]) -> float:
    """What bounds say that a step with these layers takes at least."""
    bounds = bounds_of(route.flow, layers)
    return max(bounds.of(mesh, number) for mesh, number in enumerate(layers)) + route.once


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_takes_what_the_plan_takes(kind: str) -> None:
    for each in draws(kind):
        assert each.route.seconds(each.line.layers) == pytest.approx(each.step_s(), rel=ROUNDING)


@pytest.mark.parametrize("whole", [route_module.PLAYED_WHOLE, 0])
def test_splits_take_as_long_together_as_each_by_itself(
    whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, so that it makes no difference which way they are played."""
    monkeypatch.setattr(route_module, "PLAYED_WHOLE", whole)
    many = in_part = 0
    for each in draws("bf16") + draws("long"):
        route, total = each.route, each.costs.workload.spec.num_layers
        every = [*islice(splits(route.least, [total] * route.num_meshes, total), 2 * TOGETHER)]
        many += len(every) >= TOGETHER
        in_part += len(every) >= TOGETHER and route.played != (route.pattern,)
        assert route.seconds_of(every) == [route.seconds(layers) for layers in every], each
    assert many > 50 and (in_part > 20 or whole), (many, in_part)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_what_the_plan_holds(kind: str) -> None:
    """Or more where a step has one microbatch: searches count all gradients beside what is kept."""
    several = 0
    for each in draws(kind):
        workload = each.costs.workload
        plan = plan_of([each.line], each.costs.problem)
        memory = memory_of_plan(plan, workload.spec, workload.seq_len)
        for mesh, stages in enumerate(plan.pipelines[0].positions()):
            rank = plan.pipelines[0].stages[stages[0]].mesh.ranks[0]
            counted = each.route.bytes(mesh, each.line.layers[mesh])
            if plan.pipelines[0].num_microbatches == 1:
                assert counted >= memory[rank].total * (1 - ROUNDING)
                continue
            several += 1
            assert counted == pytest.approx(memory[rank].total, rel=ROUNDING)
    assert several > 50, several


@pytest.mark.parametrize("kind", KINDS)
def test_no_split_is_faster_than_its_bound(kind: str) -> None:
    for each in draws(kind, 4 * DRAWS):
        layers = each.line.layers
        assert shortest(each.route, layers) <= each.route.seconds(layers) * (1 + ROUNDING), each


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_has_its_place_within_the_time_it_takes(kind: str) -> None:
    """The limits on each mesh's layers, with which whole routes are ruled out."""
    for each in draws(kind, 2 * DRAWS):
        route, layers = each.route, each.line.layers
        seconds = route.seconds(layers) * (1 + ROUNDING)
        free = [sum(layers)] * len(layers)
        for most in (route.most_within(seconds, free), *_where_it_fits(each, seconds)):
            held = zip(layers, most, strict=True)
            assert all(n <= limit for n, limit in held), (each, most)
            assert has_place(route.least, most, sum(layers))


def _where_it_fits(each: Drawn, seconds: float) -> Iterator[list[int]]:
    """Limits that count memory too, all of it and as quickly as it is counted, where it fits."""
    for room in each.route.room, each.route.roomy:
        if all(n <= limit for n, limit in zip(each.line.layers, room, strict=True)):
            yield each.route.most_within(seconds - each.route.once, room)


def test_bounds_are_of_use() -> None:
    """A bound of nothing would hold too: most say at least so much of a long step."""
    near = []
    for each in draws("long"):
        if each.line.samples >= 8 * each.line.micro and each.line.num_meshes > 1:
            layers = each.line.layers
            near.append(shortest(each.route, layers) / each.route.seconds(layers))
    assert len(near) > 50
    assert sorted(near)[len(near) // 2] > 0.8


def test_room_is_what_fits() -> None:
    """The most layers with which a rank's bytes are within the budget, and not one more."""
    tight = fuller = 0
    for each in draws("bf16") + draws("cores"):
        route, total = each.route, each.costs.workload.spec.num_layers
        for mesh, (most, quickly) in enumerate(zip(route.room, route.roomy, strict=True)):
            assert most <= quickly
            fuller += most < quickly
            budget = each.costs.budgets[route.ranks[mesh].pool]
            assert most < 0 or route.bytes(mesh, most) <= budget
            if most < total:
                tight += 1
                assert route.bytes(mesh, most + 1) > budget
    assert tight > 50 and fuller > 5


FAR = {"gpipe": (ROUNDING, ROUNDING), "1f1b": (0.005, 0.02), "zb-h1": (0.005, 0.02)}
"""What is played in part: relative errors of nine in ten, and of all. Wires that are busier than
meshes make schedules of several stages a mesh repeat themselves after more than one round."""
OTHERS_FAR = 0.05, 0.1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_long_step_grows_as_a_part_of_it_does(
    schedule: ScheduleName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against every microbatch played, with unlike meshes and borders of any rate."""
    monkeypatch.setattr(route_module, "PLAYED_WHOLE", 0)
    off = []
    for seed in range(30):
        each = long_drawn(Random(seed), schedule)
        assert each.route.played[-1] != each.route.pattern
        off.append(abs(each.route.seconds(each.line.layers) / each.step_s() - 1))
    most, worst = FAR.get(schedule, OTHERS_FAR)
    off.sort()
    assert off[len(off) * 9 // 10] < most
    assert off[-1] < worst


def test_a_step_is_played_whole_where_that_is_quick() -> None:
    for schedule in SCHEDULES:
        each = long_drawn(Random(1), schedule)
        assert each.route.played == (each.route.pattern,)
        assert each.route.actions <= route_module.PLAYED_WHOLE


PATTERNS = [
    Pattern(
        name, meshes, meshes * (2 if name in ("interleaved", "zb-v", "dualpipe-v") else 1), many
    )
    for name in SCHEDULES
    for meshes in (1, 2, 3, 5, 8)
    for many in (1, 2, meshes, 2 * meshes + 1, 4 * meshes, 7 * meshes + 3)
    if meshes > 1 or name in ("1f1b", "gpipe", "zb-h1")
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_more_microbatches_hold_no_more(pattern: Pattern) -> None:
    """What a mesh holds at its peak, against all of the schedule counted action by action."""
    for mesh, counts in enumerate(held_at_peak(pattern)):
        now: Counter[int] = Counter()
        peak = 0
        for action in schedule_of_pattern(pattern)[mesh]:
            now[action.stage] += {"F": 1, "I": 0}.get(action.kind, -1)
            peak = max(peak, now.total())
        assert sum(counts) == peak


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_more_microbatches_have_no_more_at_borders(pattern: Pattern) -> None:
    """Against all of the schedule, as lists; one more where an odd number of them takes it."""
    lists = tuple(map(write, schedule_of_pattern(pattern)))
    every = borders_at_peak(replace(pattern, lists=lists))
    far = [many - real for many, real in zip(borders_at_peak(pattern), every, strict=True)]
    assert far == [0] * len(far) or (pattern.name == "zb-v" and {*far} == {0, 1})


def test_the_most_layers_for_a_budget_are_found_in_few_looks() -> None:
    """Against all of them, where layers need unlike much, nothing, or have no room on the host."""
    rng = Random(0)
    for _ in range(300):
        steps = rng.choices((0.0, 1.0, 1.0, 1.0, 30.0, inf), (2, 4, 4, 4, 1, 0.2), k=128)
        needs = list(accumulate(steps, initial=rng.random()))
        budget, asked = rng.uniform(0, 300), list[int]()

        def need(layers: int, needs: list[float] = needs, asked: list[int] = asked) -> float:
            asked.append(layers)
            return needs[layers]

        found = most_for(need, budget, 128)
        assert found == sum(each <= budget for each in needs) - 1
        assert len(asked) == len({*asked})
    looked: dict[int, float] = {}
    assert most_for(lambda n: looked.setdefault(n, 3.0 * n + 10), 100, 128) == 30
    assert len(looked) == 4


def test_the_best_split_of_all_is_found() -> None:
    """Against every split that fits, one by one."""
    several = 0
    for each in draws("bf16", 100):
        route, total = each.route, each.costs.workload.spec.num_layers
        every = list(splits(route.least, route.room, total))
        if not 4 < len(every) < 200:
            continue
        several += 1
        best = explore(route, inf).best
        assert best is not None
        assert best.seconds == pytest.approx(min(map(route.seconds, every)), rel=ROUNDING)
    assert several > 20

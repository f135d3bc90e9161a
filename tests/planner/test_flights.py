"""Numbers in flight that a search looks at, where borders between meshes take long."""

from dataclasses import replace

import pytest
from planner.told import Told

from benchmarks.poorer import AS_COMMANDS
from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.models.llama.sizes import SIZES
from weft.planner.fit import shortages
from weft.planner.problem import Problem, Workload
from weft.planner.search import search
from weft.planner.search.choice import Line, Section, plan_of
from weft.planner.search.costs import Costs
from weft.planner.search.flights import PARTS, deeper
from weft.planner.search.found import Pruned
from weft.planner.search.group import Group, Ledger
from weft.planner.search.meshes import Meshes
from weft.planner.search.route import Route
from weft.planner.validate import validate_plan

KINDS = catalogue()


def pool(chip: str, per_node: int, gbit: float) -> ChipPool:
    return ChipPool(chip=KINDS[chip], num_nodes=1, chips_per_node=per_node, network_gbit_s=gbit)


def problem(gbit: float) -> Problem:
    pools = pool("H100-SXM5-80GB", 4, gbit), pool("L40S", 8, max(gbit, 10))
    workload = Workload(spec=SIZES["llama2-13b"], seq_len=2048, samples=200)
    return Problem(workload, ClusterView(pools), options=AS_COMMANDS)


def route(gbit: float, *, in_flight: tuple[int, ...] = ()) -> Route:
    meshes = Section(0, (("dp", 4),), 1), Section(1, (("dp", 4), ("tp", 2)), 1)
    line = Line(meshes, 4, "1f1b", (26, 14), 200, in_flight=in_flight)
    return Route(Costs(problem(gbit), 1), line)


def test_as_many_as_are_on_their_way() -> None:
    """By hand: what is on its way between two meshes, in microbatches that are done meanwhile."""
    slow = route(1)
    (border,) = slow.borders
    ways = 2 * (border.transfer_s + border.latency_s) / slow.course.cycle_s
    assert ways == pytest.approx(2, rel=1e-3), "the border is the slowest of all"
    assert PARTS == (1.0, 0.5), "two more hide all, one more half"
    assert list(deeper(slow)) == [(4, 1), (3, 1)]
    assert not list(deeper(route(400))), "next to nothing is on its way"
    usual, half, whole = (
        slow.with_numbers(held).seconds((26, 14)) for held in ((), (3, 1), (4, 1))
    )
    assert whole < 0.85 * half < 0.7 * usual


@pytest.mark.parametrize("held", [(), (3, 1), (4, 1), (6, 2)])
def test_a_long_step_is_played_in_part(held: tuple[int, ...]) -> None:
    """Numbers in flight repeat themselves too."""
    long = route(1, in_flight=held)
    long = Route(long.costs, replace(long.line, micro=1, samples=4000))
    assert long.played != (long.pattern,)
    part = long.seconds((26, 14))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.planner.search.route.PLAYED_WHOLE", 10**9)
        whole = Route(long.costs, long.line)
        assert whole.played == (whole.pattern,)
        assert part == pytest.approx(whole.seconds((26, 14)), rel=1e-3)


def test_fewer_samples_have_no_more_in_flight_than_there_are() -> None:
    """Pipelines side by side give each other samples: what is left is a plan that can be run."""
    asked, long = problem(1), route(1, in_flight=(4, 1)).line
    lean = tuple(each._replace(zero=2, recompute="full") for each in long.sections)
    group = Group(Meshes(Costs(asked, 1)), (0, 1), Ledger(Pruned()))
    timed = group.again(replace(long, sections=lean), 12)
    assert timed is not None and timed.line.in_flight == (3, 1)
    validate_plan(plan_of([timed.line], asked), num_layers=40, global_batch=12)


def test_numbers_in_flight_count_as_candidates() -> None:
    asked = problem(1)
    few = replace(asked.options, effort=10_000)
    found = search(replace(asked, options=few, workload=replace(asked.workload, samples=16)))
    assert any(each.plan.pipelines[0].in_flight for each in (found.best, *found.others))
    assert found.considered == found.simulated + found.pruned.total


def test_pipelines_that_look_worse_than_thousands_are_looked_at() -> None:
    """With as much effort for both kinds together as for one, none of those through both was
    reached that beats four H100 alone, 1.497 s."""
    asked = problem(1)
    few = replace(asked, workload=replace(asked.workload, samples=16))
    found = search(few, watch=Told(1.299))
    assert {pool.chip.name for pool in found.best.cluster.pools} == {"H100-SXM5-80GB", "L40S"}
    assert found.best.time.step_s < 1.3


def test_borders_carry_full_microbatches_before_a_smaller_last_one() -> None:
    whole = route(1)
    ragged = Route(whole.costs, replace(whole.line, micro=8, samples=202))
    (border,) = ragged.borders
    assert ragged.flow.carrying == pytest.approx(border.transfer_s)
    assert ragged.flow.carrying_last == pytest.approx(border.transfer_s / 2), (
        "1 of 2 samples a rank"
    )


def test_slow_chips_behind_a_slow_link_help_fast_ones() -> None:
    """With the usual numbers in flight four H100 are faster alone, and a search that knows no
    others at first ends there."""
    asked = problem(1)
    whole = replace(asked, options=replace(asked.options, schedules=("1f1b",)))
    alone = search(whole.on(ClusterView(whole.cluster.pools[:1]))).best
    found = search(whole, watch=Told(0.749 * alone.time.step_s)).best
    assert found.time.step_s < 0.75 * alone.time.step_s
    assert len(found.cluster.pools) == 2 and not shortages(found.plan, whole.on(found.cluster))

"""Borders that the planner moves into layers: where it pays, as far as memory goes, no further."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.finer_borders import OPTIONS, cluster, distance
from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.models.llama.sizes import SIZES
from weft.planner.explain import what_cuts_save
from weft.planner.fit import shortages
from weft.planner.forecast import forecast
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import refined, search
from weft.planner.search.finer import with_finer_borders
from weft.planner.search.found import Candidate
from weft.planner.search.orders import with_made_orders
from weft.schedules.registry import by_preference


def problem(num_layers: int, *speeds: float, cuts: bool = True, gib: float = 80) -> Problem:
    """A pipeline through chips, one of each speed."""
    options = replace(OPTIONS, cuts_layers=cuts, in_flight=False, schedules=("1f1b",), micros=(1,))
    spec = replace(SIZES["llama2-7b"], num_layers=num_layers)
    workload = Workload(spec=spec, seq_len=4096, samples=16)
    return Problem(workload, cluster(speeds, gib), options=options)


@pytest.mark.parametrize(
    ("num_layers", "speeds", "gain"), [(5, (1.0, 0.8, 0.45), 1.1), (4, (1.0, 1.0, 1.0), 1.1)]
)
def test_a_cut_saves_time(num_layers: int, speeds: tuple[float, ...], gain: float) -> None:
    asked = problem(num_layers, *speeds)
    whole = search(problem(num_layers, *speeds, cuts=False)).best
    best = search(asked).best
    there = asked.on(best.cluster)
    assert best.plan.cuts and not whole.plan.cuts and not shortages(best.plan, there)
    assert best.time.step_s == there.time(best.plan).step_s < whole.time.step_s / gain
    assert distance(asked) <= 1.001


def test_the_forecast_says_what_a_cut_saves() -> None:
    asked = problem(4, 1.0, 1.0)
    cut, whole = (
        search(replace(asked, options=replace(asked.options, cuts_layers=cuts))).best
        for cuts in (True, False)
    )
    assert [stage.layers for _, _, stage in cut.plan.stages()] == [(0, 2.5), (2.5, 4)]
    longer = whole.time.step_s / cut.time.step_s - 1
    assert longer > 0.07
    saved = what_cuts_save(forecast(cut.plan, asked))
    assert saved == (
        "borders inside layers 2: with whole layers beside them a step would take "
        f"{longer:.1%} longer"
    )
    (pipeline,) = cut.plan.pipelines
    early = replace(pipeline, lists=("16F 16B", "16(F B)"))
    listed = replace(cut.plan, pipelines=(early,))
    assert forecast(listed, asked).step_s < 0.96 * cut.time.step_s
    assert what_cuts_save(forecast(listed, asked)) == saved
    free = replace(asked.options, in_flight=True, schedules=by_preference())
    makes = replace(asked, options=free)
    made = with_made_orders(replace(whole, cluster=makes.cluster), makes)
    assert made.time.step_s < whole.time.step_s, "a list is made for whole layers too"
    longer = made.time.step_s / forecast(listed, makes).step_s - 1
    assert what_cuts_save(forecast(listed, makes)).endswith(f"{longer:.1%} longer")
    assert what_cuts_save(forecast(cut.plan, problem(4, 1.0, 1.0, gib=1))) == (
        "borders inside layers 2: with whole layers beside them it would not fit"
    )
    assert what_cuts_save(forecast(whole.plan, asked)) == ""


def test_plans_are_weighed_as_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is slow with whole layers is the fastest with its border inside one."""
    monkeypatch.setattr("weft.planner.search.refined.MOST_PROMISING", 1)
    monkeypatch.setattr("weft.planner.search.refined.BEST_FEW", 1)
    kinds = catalogue()
    pools = (
        ChipPool(chip=kinds["H100-SXM5-80GB"], num_nodes=1, chips_per_node=4, network_gbit_s=800),
        ChipPool(chip=kinds["A100-SXM4-40GB"], num_nodes=1, chips_per_node=4, network_gbit_s=400),
    )
    options = Options(
        cuts_layers=True,
        in_flight=True,
        schedules=("zb-h1", "1f1b"),
        recompute=("off",),
        zero=(1,),
        effort=Options().effort // 10,
    )
    workload = Workload(spec=SIZES["llama3.2-1b"], seq_len=4096, samples=32)
    best = search(Problem(workload, ClusterView(pools), options=options)).best
    assert [stage.layers for _, _, stage in best.plan.stages()] == [(0, 14.5), (14.5, 16)]


def test_a_cut_needs_room() -> None:
    """The same plan on chips of which the one that would get more has no room for it."""
    whole = search(problem(4, 1.0, 1.0, cuts=False)).best
    (cut,) = with_finer_borders([whole], problem(4, 1.0, 1.0))
    assert cut.plan.cuts
    need = [whole.memory[0].total / 2**30, cut.memory[0].total / 2**30]
    assert need[1] > need[0]
    tight = problem(4, 1.0, 1.0, gib=sum(need) / 2 / 0.92)
    (kept,) = with_finer_borders([replace(whole, cluster=tight.cluster)], tight)
    assert kept.plan == whole.plan


def test_one_plan_on_two_kinds_of_chips_is_refined_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans name no chips: of two candidates with the same plan on others neither stands for both,
    and each is asked about once."""
    both = problem(4, 1.0, 0.5)
    alone = (both.on(ClusterView((pool,))) for pool in both.cluster.pools)
    first, second = (search(one).best for one in alone)
    assert first.plan == second.plan and first.cluster != second.cluster
    asked = []

    def finer(few: Sequence[Candidate], problem: Problem) -> list[Candidate]:
        asked.extend(few)
        return with_finer_borders(few, problem)

    monkeypatch.setattr(refined, "with_finer_borders", finer)
    refined.refined([[first]], both, near=[first, second, first])
    assert [one.cluster for one in asked] == [first.cluster, second.cluster]

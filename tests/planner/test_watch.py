"""Whoever waits for a search is told how far it is, and may end it with the best so far."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from planner.told import Told

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.config.errors import ConfigError
from weft.models.llama.sizes import SIZES
from weft.planner.enough import enough
from weft.planner.fit import shortages
from weft.planner.outlook import outlook_of_search
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import NoPlan, Watch, refined, search
from weft.planner.search.found import ENDED_EARLY, Candidate, Found
from weft.planner.search.orders import with_made_orders

KINDS = "H100-SXM5-80GB", "A100-SXM4-80GB", "RTX4090"
POOLS = tuple(ChipPool(chip=catalogue()[name], num_nodes=1, chips_per_node=2) for name in KINDS)
WORK = Workload(spec=SIZES["llama3.2-1b"], seq_len=2048, samples=32)
OPTIONS = Options(schedules=("1f1b",), recompute=("full",), zero=(1,), effort=20_000)
PROBLEM = Problem(WORK, ClusterView(POOLS), options=OPTIONS)


def test_all_of_a_search_is_told() -> None:
    """More and more candidates, a step that gets no longer, and in the end that of the best before
    it is refined; whoever waits changes nothing."""
    watch = Told()
    found, alone = search(PROBLEM, watch=watch), search(PROBLEM)
    done, steps = zip(*watch.heard, strict=True)
    assert list(done) == sorted(done) and done[-1] > 0.5 * found.considered
    assert list(steps) == sorted(steps, reverse=True) and steps[0] == inf
    assert found.best.time.step_s <= steps[-1] * 1.001 and not found.is_cut_short
    assert replace(found, seconds=0.0) == replace(alone, seconds=0.0)


def test_what_is_ended_is_the_best_so_far() -> None:
    """As soon as something fits, or as it is fast enough. Where time was over from the beginning,
    it is not over before something fits."""
    through = search(PROBLEM)
    first, good = (Told(until) for until in (1e9, 1.05 * through.best.time.step_s))
    watches = first, good, Watch(seconds=0.0)
    at_first, at_good, at_once = (search(PROBLEM, watch=watch) for watch in watches)
    assert at_once.best == at_first.best
    assert at_first.best.time.step_s > at_good.best.time.step_s >= through.best.time.step_s
    assert at_first.simulated < at_good.simulated < through.simulated
    for found in (at_first, at_good):
        assert found.is_cut_short and not found.exhausts
        assert found.pruned.total + found.simulated == found.considered, "all has a reason"
        assert found.bound_s == through.bound_s
        assert not shortages(found.best.plan, PROBLEM.on(found.best.cluster))
    assert first.heard[-1][1] < inf, "and nothing more was told"
    outlook = outlook_of_search(at_first, PROBLEM, explain=True)
    assert outlook.helps and all(each.same_plan for each in outlook.helps), "no search after it"


def test_refining_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deep pipelines have many orders, each of which takes long to make: what is best so far is
    refined, and no other."""
    options = replace(OPTIONS, in_flight=True, cuts_layers=True)
    problem, made = replace(PROBLEM, options=options), list[Candidate]()

    def searched(watch: Watch, *, stops: bool) -> Found:
        def made_orders(candidate: Candidate, *asked: Any, **more: Any) -> Candidate:
            made.append(candidate)
            if stops:
                watch.stop()
            return with_made_orders(candidate, *asked, **more)

        made.clear()
        monkeypatch.setattr(refined, "with_made_orders", made_orders)
        return search(problem, watch=watch)

    through = searched(Watch(), stops=False)
    assert len(made) > 4 and not through.is_cut_short
    ended = searched(Watch(), stops=True)
    assert len(made) <= 2 and ended.is_cut_short
    assert ended.best.time.step_s >= through.best.time.step_s


def test_searches_that_explain_end_too() -> None:
    """What one of them has found by then says nothing: that is asked of the plan itself."""
    found, heard = search(PROBLEM), list[float]()

    def heard_once(_: int, best_s: float) -> None:
        heard.append(best_s)
        watch.stop()

    watch = Watch(heard_once)
    watch.best_s = found.best.time.step_s
    helps = outlook_of_search(found, PROBLEM, explain=True, watch=watch).helps
    assert set(heard) == {found.best.time.step_s}, "not of other chips"
    assert helps and all(each.same_plan for each in helps)
    assert not any(each.change.startswith("one more node") for each in helps)


def test_what_is_over_stays_so() -> None:
    assert Watch().within(0.0).is_over
    assert Watch(seconds=0.0).within(60.0).is_over
    assert not Watch(seconds=60.0).within(60.0).is_over


def test_nothing_fits_in_no_time_either() -> None:
    large = replace(PROBLEM, workload=replace(WORK, spec=SIZES["llama3-70b"]))
    with pytest.raises(NoPlan) as late:
        search(large, watch=Watch(seconds=0.0))
    with pytest.raises(NoPlan) as told:
        search(large)
    assert str(late.value) == str(told.value)


def test_the_most_that_was_reached_early_is_not_the_most() -> None:
    need = WORK.flops_s(1.1 * search(PROBLEM, watch=Watch(seconds=0.0)).bound_s)
    with pytest.raises(ConfigError, match=ENDED_EARLY):
        enough(PROBLEM, need, watch=Watch(seconds=0.0))

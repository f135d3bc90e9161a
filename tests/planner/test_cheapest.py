"""The nodes on which a step costs least, against every choice searched one by one."""

import re
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.config.errors import ConfigError
from weft.models.llama.sizes import SIZES
from weft.planner.cheapest import cheapest
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import NoPlan, Watch, search
from weft.planner.search.costs import KnownCosts
from weft.planner.search.found import ENDED_EARLY
from weft.planner.search.least import Relaxed
from weft.planner.some_nodes import _choices

H100, A100 = catalogue()["H100-SXM5-80GB"], catalogue()["A100-SXM4-80GB"]
OPTIONS = Options(
    schedules=("1f1b",), recompute=("full",), zero=(1,), micros=(1,), max_split=2, effort=20_000
)
WORK = Workload(spec=SIZES["llama3-8b"], seq_len=4096, samples=64)


def problem(prices: tuple[float | None, float | None], nodes: tuple[int, int] = (3, 2)) -> Problem:
    pools = tuple(
        ChipPool(chip=chip, num_nodes=number, chips_per_node=4, price_per_hour=price)
        for chip, number, price in zip((H100, A100), nodes, prices, strict=True)
    )
    return Problem(WORK, ClusterView(pools), options=OPTIONS)


@cache
def seconds_on(nodes: tuple[int, ...]) -> float:
    """Of a step; without end where nothing fits."""
    whole = problem((None, None)).cluster.pools
    pools = [replace(p, num_nodes=n) for p, n in zip(whole, nodes, strict=True) if n]
    if not pools:
        return inf
    try:
        return search(problem((None, None)).on(ClusterView(tuple(pools)))).best.time.step_s
    except NoPlan:
        return inf


def everything(asked: Problem) -> dict[tuple[int, ...], tuple[float, float]]:
    """Price and seconds of a step, by nodes."""
    found = {}
    for nodes in product(*(range(pool.num_nodes + 1) for pool in asked.cluster.pools)):
        step_s = seconds_on(nodes)
        each = zip(asked.cluster.pools, nodes, strict=True)
        hire = sum(n * p.chips_per_node * (p.price_per_hour or 0.0) for p, n in each) / 3600
        if step_s < inf:
            found[nodes] = step_s * hire, step_s
    return found


@pytest.mark.parametrize("prices", [(2.5, 1.3), (2.5, 0.4), (2.5, 0.0)], ids=str)
def test_nothing_is_cheaper(prices: tuple[float, float]) -> None:
    """Whatever a step may take; and nothing costs less than the bound."""
    asked = problem(prices)
    every = everything(asked)
    seconds = sorted(step_s for _, step_s in every.values())
    for within_s in (inf, seconds[len(seconds) // 2], seconds[0]):
        taken, found = cheapest(asked, within_s)
        wanted, fastest_s = min(each for each in every.values() if each[1] <= within_s)
        chosen = taken.chosen
        assert chosen.cost == pytest.approx(wanted, rel=1e-9)
        assert found.best.time.step_s == pytest.approx(fastest_s), "costs as much, and is slower"
        assert every[chosen.nodes] == pytest.approx((chosen.cost, found.best.time.step_s))
        assert chosen.least <= chosen.cost and found.best.time.step_s <= within_s
        assert chosen.searched <= chosen.choices == 11
    assert cheapest(asked, inf)[0].chosen.searched < 11, "some bound is good for something"


def test_who_has_no_time_gets_the_first_that_is_fast_enough() -> None:
    """What the others may cost is said all the same."""
    asked = problem((2.5, 0.4))
    fastest_s = search(asked).best.time.step_s
    (through, _), (ended, found) = (
        cheapest(asked, 1.6 * fastest_s, watch=watch) for watch in (None, Watch(seconds=0.0))
    )
    assert 1 <= ended.chosen.searched < through.chosen.searched
    assert ended.chosen.least == through.chosen.least <= through.chosen.cost <= ended.chosen.cost
    assert found.is_cut_short
    with pytest.raises(ConfigError, match=ENDED_EARLY):
        cheapest(asked, fastest_s, watch=Watch(seconds=0.0))


def test_what_is_known_of_other_nodes_changes_nothing() -> None:
    """Of more nodes, of fewer, of others in their place, and with another workload."""
    known, first = KnownCosts(), problem((2.5, 1.3), (2, 2))
    near, far = first.cluster.pools
    slow = first.on(ClusterView((near, replace(far, network_gbit_s=1.0))))
    short = replace(first, workload=replace(WORK, seq_len=1024))
    less = replace(first, options=replace(OPTIONS, zero=(0,)))
    fewer, others = problem((2.5, 1.3), (1, 1)), first.on(ClusterView((far, near)))
    asked = [first, fewer, others, slow, short, less]
    for each in asked:
        shared, alone = search(each, known=known), search(each)
        assert replace(shared, seconds=0.0) == replace(alone, seconds=0.0)
        assert Relaxed(each, known).least_s((0, 1)) == Relaxed(each).least_s((0, 1))


def test_large_clusters_have_few_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes in coarser steps, down to none, one and all of each pool; never without all of it."""
    whole = problem((2.5, 1.3), (500, 235)).cluster
    for limit, many in ((10_000, 19 * 17), (100, 7 * 6), (1, 3 * 3)):
        monkeypatch.setattr("weft.planner.some_nodes.MOST_CHOICES", limit)
        choices = [*_choices(whole)]
        assert (len(choices), max(choices)) == (many - 1, (500, 235))


def test_of_one_machine_all_chips_are_hired() -> None:
    beside, apart = problem((5.0, 1.0), (1, 2)).cluster.pools
    both = [replace(each, num_nodes=1, node="desk") for each in (beside, apart)]
    choices = set(_choices(ClusterView((both[0], apart, both[1]))))
    assert choices == {(1, 0, 1), (1, 1, 1), (1, 2, 1), (0, 1, 0), (0, 2, 0)}


def test_what_cannot_be() -> None:
    """No plan is so fast; a price is not known; nothing holds the model."""
    asked = problem((2.5, 1.3), (1, 1))
    fastest = search(asked).best.time.step_s
    with pytest.raises(ConfigError) as caught:
        cheapest(asked, 0.9 * fastest)
    assert caught.value.key == "--within"
    said = re.search(r"at least (\S+), the seconds", str(caught.value))
    assert said is not None and fastest <= float(said[1]) < 1.01 * fastest
    with pytest.raises(ConfigError, match="price_per_hour") as caught:
        cheapest(problem((2.5, None)), inf)
    assert caught.value.value == A100.name
    large = replace(asked, workload=replace(WORK, spec=SIZES["llama3-70b"]))
    with pytest.raises(NoPlan):
        cheapest(large, inf)

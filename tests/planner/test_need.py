"""Compute that is asked for, taken from a pool by what a workload reaches."""

from dataclasses import replace
from itertools import product

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.config.errors import ConfigError
from weft.cost.flops import train_flops_per_token
from weft.cost.timing import WEFT
from weft.models.llama.sizes import SIZES
from weft.planner.need import Mix, choose_mix, in_units, parse_need, reached_flops
from weft.planner.problem import Problem, Workload
from weft.planner.search import search
from weft.simulate.step import Knowledge

H100, A100 = catalogue()["H100-SXM5-80GB"], catalogue()["A100-SXM4-80GB"]
WORKLOAD = Workload(spec=SIZES["llama3-8b"], seq_len=8192, samples=64)


def reached(
    pool: ChipPool, workload: Workload = WORKLOAD, knowledge: Knowledge | None = None
) -> float:
    cluster = ClusterView((pool,))
    return reached_flops(pool, Problem(workload, cluster, knowledge or Knowledge()))


def pool(h100_price: float | None = 2.5, a100_price: float | None = 1.3) -> ClusterView:
    return ClusterView(
        (
            ChipPool(chip=H100, num_nodes=6, chips_per_node=8, price_per_hour=h100_price),
            ChipPool(chip=A100, num_nodes=9, chips_per_node=4, price_per_hour=a100_price),
        )
    )


def mix(cluster: ClusterView, need: float) -> Mix:
    return choose_mix(Problem(WORKLOAD, cluster), need)


@pytest.mark.parametrize(
    ("text", "flops_s"),
    [("2.0PF", 2e15), ("350 TF", 3.5e14), ("1EF", 1e18), ("1.5PFLOP/s", 1.5e15)],
)
def test_units(text: str, flops_s: float) -> None:
    assert parse_need(text) == flops_s


@pytest.mark.parametrize("text", ["2", "2 GF", "PF", "-1PF", "0PF", "2pf"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a number and a unit: TF, PF or EF"):
        parse_need(text)


def test_in_units() -> None:
    assert [in_units(x) for x in (3e11, 2.5e14, 2.04e15, 3e18)] == [
        "0.3 TF",
        "250 TF",
        "2.04 PF",
        "3 EF",
    ]
    assert in_units(1e23) == "100,000 EF"


def test_a_chip_counts_for_what_it_reaches_not_for_its_name() -> None:
    """A chip with half the rates of another under the same name counts half."""
    whole = reached(pool().pools[0])
    assert 0.2 * 989.4e12 < whole < 989.4e12
    slow = replace(H100, peak_tflops={"bf16": 989.4 / 2}, memory_gb_s=3350 / 2)
    half = reached(replace(pool().pools[0], chip=slow), WORKLOAD)
    assert half == pytest.approx(whole / 2, rel=0.01)
    slow_software = Knowledge(software=replace(WEFT, slowdown=2 * WEFT.slowdown))
    assert reached(pool().pools[0], WORKLOAD, slow_software) == pytest.approx(whole / 2)


def test_compute_is_of_the_workload() -> None:
    """Attention reaches less of a peak than large products, so long sequences reach less."""
    long = replace(WORKLOAD, seq_len=131_072)
    first, second = pool().pools
    assert reached(first, long) < 0.8 * reached(first, WORKLOAD)
    shares = [reached(first, workload) / reached(second, workload) for workload in (WORKLOAD, long)]
    assert shares[0] != pytest.approx(shares[1], rel=0.02)


@pytest.mark.parametrize("prices", [(2.5, 1.3), (2.5, 0.8), (9.0, 1.0), (None, None)])
@pytest.mark.parametrize("need", [1e14, 1.2e15, 4.4e15, 1.3e16, 2.4e16])
def test_no_other_whole_nodes_are_cheaper(
    prices: tuple[float | None, float | None], need: float
) -> None:
    cluster = pool(*prices)
    found = mix(cluster, need)
    assert found.flops_s >= need
    cheapest = min(
        sum(replace(part, num_nodes=n).total_cost for part, n in zip(found.parts, ns, strict=True))
        for ns in product(range(7), range(10))
        if sum(replace(p, num_nodes=n).total_flops for p, n in zip(found.parts, ns, strict=True))
        >= need
    )
    assert found.cost == pytest.approx(cheapest)
    assert mix(cluster, need) == found


@pytest.mark.parametrize("need", [1e14, 1.5e15, 3e15, 5e15])
@pytest.mark.parametrize("prices", [(9.0, 1.0, 2.0), (1.0, 9.0, 2.0), (3.0, 3.0, 2.0)])
def test_of_one_machine_all_chips_are_taken(prices: tuple[float, ...], need: float) -> None:
    """The cheapest of all whole machines, of which one has chips of two kinds."""
    kinds, nodes, names = (H100, A100, A100), (1, 1, 4), ("desk", "desk", "")
    pools = [
        ChipPool(chip=chip, num_nodes=n, chips_per_node=4, price_per_hour=price, node=node)
        for chip, n, price, node in zip(kinds, nodes, prices, names, strict=True)
    ]
    found = mix(ClusterView(tuple(pools)), need)
    every = [
        [replace(p, num_nodes=n) for p, n in zip(found.parts, (desk, desk, others), strict=True)]
        for desk, others in product(range(2), range(5))
    ]
    enough = [each for each in every if sum(part.total_flops for part in each) >= need]
    assert found.parts[0].num_nodes == found.parts[1].num_nodes and found.flops_s >= need
    least = min(sum(part.total_cost for part in each) for each in enough)
    assert found.cost == pytest.approx(least)


def test_large_pools_are_quick_and_exact() -> None:
    """Thousands of nodes of four kinds; what is left over is less than a node."""
    kinds = [("H100-SXM5-80GB", 2.5), ("A100-SXM4-80GB", 1.3), ("L40S", 0.6), ("Ascend-910B", 1.0)]
    cluster = ClusterView(
        tuple(
            ChipPool(chip=catalogue()[name], num_nodes=1000, chips_per_node=8, price_per_hour=price)
            for name, price in kinds
        )
    )
    found = mix(cluster, 3.3e18)
    smallest = min(part.pool.chips_per_node * part.flops_s for part in found.parts)
    assert 3.3e18 <= found.flops_s < 3.3e18 + smallest


def test_the_nodes_taken_are_the_cluster() -> None:
    found = mix(pool(), 3e15)
    taken = {part.pool.chip.name: part.num_nodes for part in found.parts if part.num_nodes}
    assert {p.chip.name: p.num_nodes for p in found.cluster.pools} == taken
    assert found.by_price and not mix(pool(None), 3e15).by_price
    first, _, total = found.sentences()
    assert first.startswith(f"takes {found.parts[0].num_nodes} of 6 nodes of 8 x H100-SXM5-80GB: ")
    price = 2.5 / found.parts[0].flops_s * 1e15
    assert first.endswith(f" a chip for this workload, {price:.3g} an hour for each PF")
    assert total.endswith(f", at the lowest price: {found.cost:.4g} an hour")


def test_nodes_for_nothing_have_a_price() -> None:
    """They are taken first, as far as they go."""
    found = mix(pool(h100_price=0.0), 3e15)
    assert found.by_price and found.cost == 0.0
    assert [part.num_nodes > 0 for part in found.parts] == [True, False]


def test_microbatches_are_as_large_as_is_best() -> None:
    """A plan of one chip reaches no more than the chip is said to: small samples one by one leave
    it idle."""
    small = Workload(spec=SIZES["debug-1m"], seq_len=128, samples=64)
    one = replace(pool().pools[0], num_nodes=1, chips_per_node=1)
    best = search(Problem(small, ClusterView((one,)))).best
    by_plan = train_flops_per_token(small.spec, 128) * 64 * 128 / best.time.step_s
    alone = reached(one, replace(small, samples=1))
    assert alone < by_plan <= reached(one, small)


def test_what_has_no_price_is_named() -> None:
    *_, some = mix(pool(None), 3e15).sentences()
    assert some.endswith(", with the fewest chips, for H100-SXM5-80GB has no price_per_hour")
    *_, none = mix(pool(None, None), 3e15).sentences()
    assert none.endswith(", with the fewest chips, for no pool has a price_per_hour")


def test_more_than_there_is() -> None:
    with pytest.raises(ConfigError) as caught:
        mix(pool(), 1e18)
    assert str(caught.value).startswith("--need = '1 EF': expected at most ")
    assert str(caught.value).endswith("It has 48 x H100-SXM5-80GB, 36 x A100-SXM4-80GB.")

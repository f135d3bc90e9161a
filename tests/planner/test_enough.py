"""Compute that a plan reaches, from the cheapest nodes that hold the model."""

import re

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.config.errors import ConfigError
from weft.models.llama.sizes import SIZES
from weft.planner.enough import enough
from weft.planner.need import choose_mix
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import NoPlan, fits

H100, A100 = catalogue()["H100-SXM5-80GB"], catalogue()["A100-SXM4-80GB"]
OPTIONS = Options(
    schedules=("1f1b",), recompute=("full",), zero=(1,), micros=(1,), max_split=2, effort=20_000
)
LARGE = Workload(spec=SIZES["llama3-70b"], seq_len=8192, samples=256)


def problem(workload: Workload = LARGE, nodes: tuple[int, int] = (6, 2)) -> Problem:
    pools = (
        ChipPool(chip=H100, num_nodes=nodes[0], chips_per_node=8, price_per_hour=2.5),
        ChipPool(chip=A100, num_nodes=nodes[1], chips_per_node=8, price_per_hour=1.3),
    )
    return Problem(workload, ClusterView(pools), options=OPTIONS)


@pytest.mark.parametrize("need", [1e15, 5e15, 1.5e16])
def test_what_is_needed_is_reached(need: float) -> None:
    """Also where the cheapest nodes that compute so much do not hold the model."""
    asked = problem()
    mix, found = enough(asked, need)
    assert asked.workload.flops_s(found.best.time.step_s) >= need
    assert 0 < mix.cluster.world_size < asked.cluster.world_size
    first = choose_mix(asked, need)
    assert fits(asked.on(mix.cluster))
    assert fits(asked.on(first.cluster)) == (need > 1e16)


def test_the_most_there_is_is_told() -> None:
    """Of all nodes: between what was refused and what a plan does reach."""
    few = problem(Workload(spec=SIZES["llama3-8b"], seq_len=8192, samples=4), nodes=(2, 1))
    with pytest.raises(ConfigError, match="the most that a plan for these nodes reaches") as caught:
        enough(few, 7e15)
    told = re.search(r"at most ([\d.]+) PF", str(caught.value))
    assert told is not None
    most = float(told[1]) * 1e15
    assert 1e15 < most < 7e15
    _, found = enough(few, 0.99 * most)
    assert few.workload.flops_s(found.best.time.step_s) >= 0.99 * most


def test_nodes_that_cannot_hold_the_model() -> None:
    with pytest.raises(NoPlan, match="expected chips with enough memory for the model"):
        enough(problem(nodes=(1, 1)), 1e15)


def test_no_mix_between_too_little_and_enough_is_jumped_over() -> None:
    """Two nodes of H100 are enough, one with two of A100 is not: a plan for a mix reaches a smaller
    part of what its chips compute, and what that part is says nothing of others."""
    pools = (
        ChipPool(chip=H100, num_nodes=2, chips_per_node=4, network_gbit_s=200, price_per_hour=2.5),
        ChipPool(chip=A100, num_nodes=2, chips_per_node=4, network_gbit_s=100, price_per_hour=0.9),
    )
    work = Workload(spec=SIZES["llama3.2-1b"], seq_len=2048, samples=64)
    options = Options(schedules=("1f1b",), recompute=("off",), effort=20_000)
    asked = Problem(work, ClusterView(pools), options=options)
    (alone,) = (p for p in choose_mix(asked, 3e15).parts if p.pool.chip is A100)
    assert alone.num_nodes == 2, "computes enough, and costs least"
    mix, found = enough(asked, 3e15)
    assert [part.num_nodes for part in mix.parts] == [2, 0]
    assert asked.workload.flops_s(found.best.time.step_s) >= 3e15

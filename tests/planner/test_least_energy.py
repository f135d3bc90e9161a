"""The nodes on which a step takes least energy, against every choice searched one by one."""

from dataclasses import replace
from functools import cache
from itertools import product
from math import inf

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.config.errors import ConfigError
from weft.models.llama.sizes import SIZES
from weft.planner.forecast import WAITING, forecast
from weft.planner.least_energy import _Joules, least_energy
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import Candidate, NoPlan, search
from weft.planner.search.least import Relaxed

H100, A100 = catalogue()["H100-SXM5-80GB"], catalogue()["A100-SXM4-80GB"]
WORK = Workload(spec=SIZES["llama3-8b"], seq_len=4096, samples=64)
OPTIONS = Options(
    schedules=("1f1b",), recompute=("full",), zero=(1,), micros=(1,), max_split=2, effort=20_000
)
Nodes = tuple[int, ...]


def problem(watts: tuple[float | None, float | None], nodes: tuple[int, int] = (3, 2)) -> Problem:
    pools = tuple(
        ChipPool(chip=replace(chip, power_w=power), num_nodes=number, chips_per_node=4)
        for chip, power, number in zip((H100, A100), watts, nodes, strict=True)
    )
    return Problem(WORK, ClusterView(pools), options=OPTIONS)


def choices(asked: Problem) -> dict[Nodes, Problem]:
    """Of nodes, each with its part of the cluster."""
    pools = asked.cluster.pools
    every = product(*(range(pool.num_nodes + 1) for pool in pools))
    return {
        nodes: asked.on(
            ClusterView(
                tuple(replace(p, num_nodes=n) for p, n in zip(pools, nodes, strict=True) if n)
            )
        )
        for nodes in every
        if any(nodes)
    }


@cache
def best_on(nodes: Nodes) -> Candidate | None:
    """What power chips have changes no plan."""
    try:
        return search(choices(problem((700.0, 400.0)))[nodes]).best
    except NoPlan:
        return None


def joules(part: Problem, best: Candidate) -> float:
    """Chip by chip, with what is sent."""
    chips = {pool.chip.name: pool.chip for pool in part.cluster.pools}
    used = tuple(replace(pool, chip=chips[pool.chip.name]) for pool in best.cluster.pools)
    cast = forecast(best.plan, part.on(ClusterView(used)), time=best.time)
    watts = 0.0
    for sign, pools in ((1, part.cluster.pools), (-1, used)):
        watts += sign * sum(p.num_chips * (p.chip.power_w or 0.0) for p in pools)
    return (cast.energy_j or 0.0) + WAITING * watts * cast.step_s


@pytest.mark.parametrize("watts", [(700.0, 400.0), (700.0, 60.0), (100.0, 400.0)], ids=str)
def test_nothing_takes_less(watts: tuple[float, float]) -> None:
    """Whatever a step may take; and no choice takes less than its bound says."""
    asked = problem(watts)
    parts = choices(asked)
    found = {nodes: best for nodes in parts if (best := best_on(nodes)) is not None}
    took = {nodes: joules(parts[nodes], best) for nodes, best in found.items()}
    bound = _Joules(asked)
    for nodes, joules_taken in took.items():
        cluster = parts[nodes].cluster
        least_s = Relaxed(parts[nodes]).least_s(range(len(cluster.pools)))
        least = bound.least(cluster, least_s)
        assert 0.5 * joules_taken < least <= joules_taken, (nodes, least, joules_taken)
    seconds = sorted(best.time.step_s for best in found.values())
    for within_s in (inf, seconds[len(seconds) // 2], seconds[0]):
        taken, plan = least_energy(asked, within_s)
        wanted = min(took[n] for n, best in found.items() if best.time.step_s <= within_s)
        assert taken.chosen.cost == pytest.approx(wanted, rel=1e-9)
        assert took[taken.chosen.nodes] == pytest.approx(wanted, rel=1e-9)
        assert plan.best.time.step_s <= within_s and taken.chosen.least <= wanted
    assert least_energy(asked, inf)[0].chosen.searched < len(parts), "a bound is good for something"


def test_chips_that_are_left_out_wait() -> None:
    """A plan for one node takes more where another stands beside it."""
    asked = problem((700.0, 400.0))
    part = choices(asked)[1, 0]
    best = best_on((1, 0))
    assert best is not None
    alone, beside = (_Joules(asked).of(choices(asked)[n].cluster, best) for n in ((1, 0), (1, 1)))
    assert alone == forecast(best.plan, part, time=best.time).energy_j
    assert beside - alone == pytest.approx(4 * 400.0 * WAITING * best.time.step_s)


def test_two_pools_of_a_chip_are_one_kind() -> None:
    """However many nodes each has."""
    asked = problem((700.0, 400.0))
    first, second = asked.cluster.pools
    half = replace(first, num_nodes=1), replace(first, num_nodes=2), second
    apart = _Joules(asked.on(ClusterView(half)))
    whole = _Joules(asked)
    for seconds in (0.01, 1.0, 5.0):
        least = whole.least(asked.cluster, seconds)
        assert apart.least(ClusterView(half), seconds) == pytest.approx(least)


def test_what_cannot_be() -> None:
    """No plan is so fast; a chip's power is not known; nothing holds the model."""
    with pytest.raises(ConfigError, match="power_w") as caught:
        least_energy(problem((700.0, None)), inf)
    assert (caught.value.key, caught.value.value) == ("--least-energy", A100.name)
    few = problem((700.0, 400.0), (1, 1))
    with pytest.raises(ConfigError, match=r"at least .*, the seconds of the fastest plan"):
        least_energy(few, 0.1)
    large = replace(few, workload=replace(WORK, spec=SIZES["llama3-70b"]))
    with pytest.raises(NoPlan):
        least_energy(large, inf)

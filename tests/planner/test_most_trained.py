"""What is trained where chips fail: formula against failures drawn, nodes against all others."""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from planner.test_cheapest import problem
from planner.told import Told

from weft.cluster.view import ClusterView
from weft.config.errors import ConfigError
from weft.planner.goodput import USUAL_HOURS, Failures, most_trained
from weft.planner.problem import Problem
from weft.planner.search import Candidate, search


def drawn(failures: Failures, step_s: float, every: int, segments: int) -> float:
    """Mean seconds for a step, of so many times ``every`` steps and a save, each done again from
    its beginning after a failure."""
    draw = np.random.default_rng(7)
    lasts = draw.exponential(1 / failures.rate, 100 * segments).tolist()
    clock_s, fails_s = 0.0, lasts.pop()

    def lasts_for(seconds: float) -> bool:
        nonlocal clock_s, fails_s
        if fails_s - clock_s >= seconds:
            clock_s += seconds
            return True
        clock_s = fails_s
        fails_s += lasts.pop()
        return False

    for _ in range(segments):
        while not lasts_for(every * step_s + failures.save_s):
            while not lasts_for(failures.restart_s):
                pass
    return clock_s / segments / every


@pytest.mark.parametrize(
    ("hours", "save_s", "restart_s", "every"),
    [(1.0, 20.0, 120.0, 50), (0.2, 5.0, 300.0, 20), (10.0, 60.0, 30.0, 400)],
)
def test_expected_is_what_failures_take(
    hours: float, save_s: float, restart_s: float, every: int
) -> None:
    failures = Failures(rate=1 / (3600 * hours), save_s=save_s, restart_s=restart_s)
    assert failures.step_s(10.0, every) == pytest.approx(
        drawn(failures, 10.0, every, 6000), rel=0.03
    )


def test_no_other_number_of_steps_is_better() -> None:
    for hours, save_s, step_s in product((0.1, 3.0, 500.0), (0.01, 2.0, 90.0), (0.3, 7.0)):
        failures = Failures(rate=1 / (3600 * hours), save_s=save_s, restart_s=60.0)
        every = failures.every(step_s)
        near = {max(1, round(every * part)) for part in np.linspace(0.5, 2, 200)} | {1, 2, 3}
        found = {number: failures.step_s(step_s, number) for number in near}
        assert failures.step_s(step_s, every) <= min(found.values()) * (1 + 1e-12)
        assert failures.expected_s(step_s) >= step_s * np.exp(failures.rate * 60.0)


def with_hours(asked: Problem, *hours: float | None) -> Problem:
    pools = zip(asked.cluster.pools, hours, strict=True)
    return asked.on(ClusterView(tuple(replace(pool, mtbf_hours=each) for pool, each in pools)))


@cache
def searched(nodes: tuple[int, ...]) -> Candidate:
    """The best plan on so many nodes of each pool."""
    asked = problem((None, None))
    pools = (
        replace(pool, num_nodes=number)
        for pool, number in zip(asked.cluster.pools, nodes, strict=True)
        if number
    )
    return search(asked.on(ClusterView(tuple(pools)))).best


@pytest.mark.parametrize("hours", [(None, None), (30.0, 400.0), (400.0, 4.0)], ids=str)
def test_nothing_trains_more(hours: tuple[float | None, float | None]) -> None:
    """Few and safe chips may train more than many; and nothing does more than the bound."""
    asked = with_hours(problem((None, None)), *hours)
    found, plan = most_trained(asked, 900.0)
    rates = [4 / (3600 * (each or USUAL_HOURS)) for each in hours]
    each: dict[tuple[int, ...], float] = {}
    for nodes in product(range(4), range(3)):
        if not any(nodes):
            continue
        best = searched(nodes)
        kept = [memory.weights + memory.optimizer for memory in best.memory.values()]
        way = asked.knowledge.hardware_of(asked.cluster.pools[0]).tiers.host
        rate = sum(number * one for number, one in zip(nodes, rates, strict=True))
        failures = Failures(rate=rate, save_s=max(kept) / way, restart_s=900.0)
        each[nodes] = failures.expected_s(best.time.step_s)
    assert found.chosen.cost == pytest.approx(min(each.values()), rel=0.02)
    assert found.chosen.least <= found.chosen.cost
    assert plan.best.time.step_s / found.goodput == pytest.approx(found.chosen.cost)
    if hours == (400.0, 4.0):
        assert found.chosen.nodes == (3, 0), "what fails each hour is left alone"
    lines = [*found.sentences()]
    assert ("mtbf_hours says better" in lines[0]) == (hours[0] is None)
    assert f"checkpoint.every={found.failures.every(found.step_s)}," in lines[2]


def test_chips_that_never_get_a_step_done() -> None:
    with pytest.raises(ConfigError, match=r"pools\.mtbf_hours"):
        most_trained(with_hours(problem((None, None), (1, 1)), 1e-7, 1e-7), 10.0)
    watch = Told()
    with pytest.raises(
        ConfigError, match=r"--restart = 1000000000000.0: expected at most 9e\+10 s, in"
    ):
        most_trained(problem((None, None), (1, 1)), 1e12, watch=watch)
    assert not watch.heard, "before any search"

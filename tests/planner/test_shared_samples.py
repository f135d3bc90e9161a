"""Samples of pipelines side by side: no other share of the same pipelines is faster."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, cast

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.models.llama.sizes import SIZES
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import search
from weft.planner.search.choice import Line, Section, Timed, mesh_axes
from weft.planner.search.group import Group, Kept
from weft.planner.search.sharing import Beside, by_speed, shared

SAME = 1 + 1e-9


@pytest.mark.parametrize("total", range(4, 9))
def test_every_pipeline_begins_with_a_sample(total: int) -> None:
    """Rounding up the slow ones takes more than the fastest has to give."""
    shares = by_speed(total, (6, 1, 6, 1))
    assert sum(shares) == total and min(shares) >= 1


@dataclass(eq=False)
class Asked:
    """A group whose pipelines take so long for a sample."""

    each_s: float
    shares: list[int] = field(default_factory=list)

    def best(self, samples: int, _cutoff: float, _kept: Kept, **_: object) -> Timed:
        self.shares.append(samples)
        line = Line((Section(0, mesh_axes(1, ()), 1),), 1, "1f1b", (1,), samples)
        return Timed(self.each_s * samples, line)

    def again(self, line: Line, samples: int) -> Timed:
        return Timed(self.each_s * samples, replace(line, samples=samples))


def test_nothing_is_looked_for_beside_what_is_not_worth_it() -> None:
    """The slow one is asked first, and then what was too slow for others."""
    fast, middle, slow = groups = Asked(0.5), Asked(1.0), Asked(9.0)
    missed: set[Any] = set()

    def look(groups: tuple[Asked, ...], weights: list[int], worth: float) -> list[list[Timed]]:
        kept, each = Kept("", 0), cast("tuple[Group, ...]", groups)
        beside = Beside(each, weights, [0.0] * len(each), kept, missed)
        return list(shared(beside, 80, cast("Callable[[], float]", lambda: inf), worth))

    assert look(groups, [4, 3, 1], 50.0) == []
    assert [len(each.shares) for each in groups] == [0, 0, 1]
    assert look((fast, slow), [1, 4], 50.0) == []
    assert [len(each.shares) for each in groups] == [0, 0, 2], "it was too slow before"
    assert look((fast, middle), [1, 1], 50.0) and fast.shares and middle.shares
    assert look((middle, slow), [1, 1], inf), "where nothing is known all are asked"


@pytest.mark.parametrize("samples", [50, 73])
def test_pipelines_share_samples_as_is_fastest(samples: int) -> None:
    """By the price of whole plans. V100 have no rate for bf16, and the last microbatch is ragged:
    steps grow in stairs with a pipeline's samples."""
    pools = (
        ChipPool(chip=catalogue()[chip], num_nodes=1, chips_per_node=chips, network_gbit_s=100)
        for chip, chips in (("A100-SXM4-40GB", 1), ("V100-SXM2-32GB", 4))
    )
    workload = Workload(spec=SIZES["llama3.2-1b"], seq_len=4096, samples=samples)
    options = Options(schedules=("1f1b",), unlike_stages=False)
    problem = Problem(workload, ClusterView(tuple(pools)), options=options)
    found = search(problem).best
    one, other = found.plan.pipelines
    there, seconds = problem.on(found.cluster), dict[int, float]()
    for share in range(one.microbatch, samples - other.microbatch + 1):
        both = replace(one, samples=share), replace(other, samples=samples - share)
        seconds[share] = there.time(replace(found.plan, pipelines=both)).step_s
    assert len(seconds) > samples / 2
    assert found.time.step_s <= min(seconds.values()) * SAME

"""Samples of pipelines side by side: no other share of the same pipelines is faster."""

from dataclasses import replace

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.models.llama.sizes import SIZES
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import search
from weft.planner.search.sharing import by_speed

SAME = 1 + 1e-9


@pytest.mark.parametrize("total", range(4, 9))
def test_every_pipeline_begins_with_a_sample(total: int) -> None:
    """Rounding up the slow ones takes more than the fastest has to give."""
    shares = by_speed(total, (6, 1, 6, 1))
    assert sum(shares) == total and min(shares) >= 1


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

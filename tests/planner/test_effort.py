"""A large batch is planned for as well as a small one: effort lasts until plans that fit."""

from dataclasses import replace

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.models.llama.sizes import SIZES
from weft.planner.problem import Problem, Workload
from weft.planner.search import Found, search

BOX = ClusterView((ChipPool(chip=catalogue()["H100-SXM5-80GB"], num_nodes=1, chips_per_node=8),))


def found(samples: int, seq_len: int) -> Found:
    spec = replace(SIZES["llama3-8b"], seq_len=seq_len)
    return search(Problem(Workload(spec=spec, seq_len=seq_len, samples=samples), BOX))


@pytest.mark.parametrize(("seq_len", "samples"), [(8192, 1000), (512, 4000)])
def test_ten_times_the_batch_takes_no_longer_a_sample(seq_len: int, samples: int) -> None:
    few, many = found(samples, seq_len), found(10 * samples, seq_len)
    assert "limit" not in many.pruned.reasons
    assert many.best.time.step_s / 10 <= few.best.time.step_s * 1.005

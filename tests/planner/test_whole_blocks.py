"""Weights with a scale for each block: no plan that is asked for, or made, cuts a block."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.config.errors import ConfigError
from weft.models.llama.sizes import SIZES
from weft.models.registry import param_specs
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import search
from weft.planner.whole_blocks import refuse_cut_blocks

LLAMA = replace(SIZES["llama3-8b"], num_layers=4)
CASES = [  # heads of 128, 14336 = 112 x 128, 14208 = 111 x 128
    ({}, 8, ""),
    ({"d_ff": 14208}, 2, r"elements 0 to 7103 of 14208 of layers.0.ff.gate"),
    ({"d_ff": 14208}, 3, ""),
]


def plan(tp: int, precision: str = "fp8-blockwise") -> Plan:
    stage = StagePlan(mesh=Mesh.of(range(tp), tp=tp), layers=(0, 4), precision=precision)
    pipeline = PipelinePlan(stages=(stage,), samples=1, microbatch=1)
    return Plan(num_layers=4, pipelines=(pipeline,))


@pytest.mark.parametrize(("sizes", "tp", "said"), CASES)
def test_a_cut_block_is_refused(sizes: dict[str, int], tp: int, said: str) -> None:
    spec = replace(LLAMA, **sizes)
    params = param_specs(spec)
    refuse_cut_blocks(plan(tp, "fp8-rowwise"), spec, params)
    if not said:
        return refuse_cut_blocks(plan(tp), spec, params)
    with pytest.raises(ConfigError, match=said):
        refuse_cut_blocks(plan(tp), spec, params)
    wide = [replace(param, fp8=".ff." not in param.name) for param in params]
    return refuse_cut_blocks(plan(tp), spec, wide)


def test_unlike_parts_cut_no_block_either() -> None:
    """A third of 112 blocks is none, a quarter is; by rows anything is."""

    def unlike(shares: tuple[int, int], precision: str = "fp8-blockwise") -> Plan:
        return plan(2, precision).each(
            lambda stage: replace(stage, mesh=stage.mesh.with_shares(tp=shares))
        )

    params = param_specs(LLAMA)
    refuse_cut_blocks(unlike((3, 1)), LLAMA, params)
    refuse_cut_blocks(unlike((2, 1), "fp8-rowwise"), LLAMA, params)
    with pytest.raises(ConfigError, match=r"width_shares = \[2, 1\].*elements 0 to 9556 of 14336"):
        refuse_cut_blocks(unlike((2, 1)), LLAMA, params)


@pytest.mark.parametrize(("seq_len", "said"), [(1024, ""), (640, "0 to 159 of 640 of a sample's")])
def test_blocks_of_tokens(seq_len: int, said: str) -> None:
    """Two ranks have four parts of a sample; the axis that cuts is named, not the first."""
    spec = replace(LLAMA, seq_len=seq_len)
    stage = StagePlan(mesh=Mesh.of(range(4), tp=2, cp=2), layers=(0, 4), precision="fp8-blockwise")
    pipeline = PipelinePlan(stages=(stage,), samples=1, microbatch=1)
    cut = Plan(num_layers=4, pipelines=(pipeline,))
    expected = pytest.raises(ConfigError, match=rf"mesh.cp = 2.*{said}") if said else nullcontext()
    with expected:
        refuse_cut_blocks(cut, spec, param_specs(spec))


def test_the_planner_cuts_none() -> None:
    """Where only two ranks together have the memory, one block too few means no such plan."""
    pool = ChipPool(chip=catalogue()["H100-SXM5-80GB"], num_nodes=1, chips_per_node=2)
    only = Options(zero=(0,), max_pipelines=1, max_stages=1)
    for d_ff, found in ((14336, {2}), (14208, {1})):
        spec = replace(LLAMA, d_ff=d_ff)
        workload = Workload(spec=spec, seq_len=8192, samples=1, precision="fp8-blockwise")
        best = search(Problem(workload, ClusterView((pool,)), options=only)).best
        assert {stage.mesh.size("tp") for _, _, stage in best.plan.stages()} == found

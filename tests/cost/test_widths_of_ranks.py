"""Ranks that have unlike parts of widths: each is priced by its own."""

from itertools import product
from math import prod

import pytest

from weft.axes.held import tiling
from weft.cost.choice import choice_of
from weft.cost.memory import memory_of_plan, stage_params
from weft.cost.operators import layer_ops
from weft.models.llama.sizes import SIZES
from weft.models.registry import dims_of_param, layout_of, param_specs, shape_of
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan

SPEC = SIZES["llama3.2-1b"]
SHARES = (5, 2, 1)
BETWEEN = (3, 2, 2)
"""Of eight key heads the first rank has four, and of all else three sevenths."""
ALIKE = (1, 1, 1)
"""No weights: the first two have three key heads, and the last one two."""


def plan(*shares: int, dp: int = 1, zero: int = 0) -> Plan:
    mesh = Mesh.of(range(dp * len(shares)), dp=dp, tp=len(shares))
    stage = StagePlan(
        mesh=mesh if shares == ALIKE else mesh.with_shares(tp=shares),
        layers=(0, SPEC.num_layers),
        precision="bf16",
        device="cuda",
        zero=zero,
    )
    line = PipelinePlan(stages=(stage,), samples=4, microbatch=2)
    return Plan(num_layers=SPEC.num_layers, pipelines=(line,))


def held(rank: int, shares: tuple[int, ...]) -> int:
    """Parameters of a rank, counted in its boxes."""
    mesh, layout = plan(*shares).pipelines[0].stages[0].mesh, layout_of(SPEC)
    boxes = (
        tiling(dims_of_param(param, layout), "param", mesh).boxes[rank]
        for param in param_specs(SPEC)
    )
    return sum(prod(box.size) for each in boxes for box in each)


@pytest.mark.parametrize(
    ("shares", "rank"), [*product([SHARES, BETWEEN], range(3)), (ALIKE, 0)], ids=str
)
def test_parameters_are_those_of_its_boxes(rank: int, shares: tuple[int, ...]) -> None:
    work = choice_of(plan(*shares).pipelines[0], 0, 2048, rank=rank).work
    ends = {"embeds": work.embeds, "predicts": work.predicts}
    priced, _ = stage_params(shape_of(SPEC), work.layers, work.axes, work.widths, **ends)
    assert priced == pytest.approx(held(rank, shares), rel=1e-3)


def test_products_are_divided_and_none_is_lost() -> None:
    """All ranks together compute as much as one alone, each its own."""
    line, shape = plan(*SHARES).pipelines[0], shape_of(SPEC)

    def flops(rank: int | None, line: PipelinePlan = line) -> float:
        work = choice_of(line, 0, 2048, rank=rank).work
        return sum(op.flops for op in layer_ops(shape, work, experts=False))

    each = [flops(rank) for rank in range(3)]
    assert sum(each) == pytest.approx(flops(0, plan(1).pipelines[0]))
    assert each[0] / each[2] == pytest.approx(5, rel=0.05) and flops(None) == each[0]


def test_key_heads_are_whole_and_channels_are_not() -> None:
    line, shape = plan(*BETWEEN).pipelines[0], shape_of(SPEC)
    ops = [
        {
            op.name: op
            for op in layer_ops(shape, choice_of(line, 0, 2048, rank=r).work, experts=False)
        }
        for r in (0, 1, None)
    ]
    first, second, most = ops
    assert first == most
    width = SPEC.d_head * (SPEC.num_heads + 2 * SPEC.num_kv_heads)
    assert first["qkv"].n == width / 2 and second["qkv"].n == width / 4
    assert first["attention"].repeat == 2 * second["attention"].repeat == SPEC.num_heads / 2 * 2
    assert first["down"].k == pytest.approx(SPEC.d_ff * 3 / 7)


def test_state_is_of_what_each_has() -> None:
    """Copies divide it among those that have the same part."""
    memory = memory_of_plan(plan(*SHARES, dp=2, zero=1), SPEC, seq_len=2048)
    first, _, last, *others = (memory[rank] for rank in range(6))
    assert first.optimizer / last.optimizer == pytest.approx(5, rel=0.01)
    assert others == [first, memory[1], last] and first.activations > 1.5 * last.activations

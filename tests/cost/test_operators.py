"""Operations of a stage: FLOPs against the closed formula and by hand."""

from dataclasses import replace

import pytest

from weft.cost.activations import layer_kept
from weft.cost.flops import forward_flops_per_token
from weft.cost.operators import Op, layer_ops, stage_ops
from weft.cost.sends import layer_sends
from weft.cost.work import StageWork
from weft.models.registry import FAMILIES, shape_of
from weft.models.shape import ExpertShape, ModelShape

SMALL = ModelShape(
    num_layers=2,
    d_model=8,
    d_ff=16,
    num_heads=4,
    num_kv_heads=2,
    d_head=2,
    vocab_size=32,
    gated=True,
)
WORK = StageWork(layers=(0, 2), embeds=True, predicts=True, samples=3, seq_len=10)


def flops(shape: ModelShape, work: StageWork) -> float:
    return sum(op.flops * number for op, number in stage_ops(shape, work))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_whole_model_computes_what_the_formula_says(family) -> None:
    for spec in family.sizes.values():
        work = WORK._replace(layers=(0, spec.num_layers), seq_len=64)
        expected = forward_flops_per_token(spec, 64) * 3 * 64
        assert flops(shape_of(spec), work) == pytest.approx(expected)


def test_layers_without_attention_cost_none() -> None:
    shape = replace(SMALL, num_heads=0, num_kv_heads=0, d_head=0)
    tokens, matrices = 3 * 10, 3 * 8 * 16
    assert flops(shape, WORK) == 2 * tokens * (2 * matrices + 32 * 8)
    layer = layer_ops(shape, WORK, experts=False)
    assert [op.name for op in layer] == ["up", "activation", "down", "norms and residuals"]
    assert layer[-1].num_bytes == layer_ops(SMALL, WORK, experts=False)[-1].num_bytes / 2
    assert shape.params == 2 * matrices + 2 * 32 * 8 + 8
    # Inputs and outputs of the norm, and what the feed-forward keeps; two bytes each.
    assert layer_kept(shape, WORK, experts=False) == 2 * tokens * (2 * 8 + 3 * 16)
    sends = {axis: WORK._replace(axes=((axis, 2),)) for axis in ("tp", "cp")}
    assert [s.times for s in layer_sends(shape, sends["tp"], experts=False)] == [1]
    assert not list(layer_sends(shape, sends["cp"], experts=False))


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_ranks_share_all_of_it(axis) -> None:
    assert flops(SMALL, WORK._replace(axes=((axis, 2),))) == pytest.approx(flops(SMALL, WORK) / 2)


def test_more_ranks_than_key_heads_repeat_them() -> None:
    found = {
        op.name: op for op in layer_ops(SMALL, WORK._replace(axes=(("tp", 4),)), experts=False)
    }
    assert found["qkv"].n == 2 * (1 + 2)  # one query head, a whole key head, a whole value head


def test_unfused_attention_computes_what_the_mask_hides() -> None:
    ops = layer_ops(SMALL, WORK._replace(fused_attention=False), experts=False)
    products = sum(op.flops for op in ops if op.kind == "batched")
    assert products == 2 * (2 * 10 * 10 * 8) * 3


def test_experts_visit_and_share_evenly() -> None:
    shape = replace(SMALL, experts=ExpertShape(num_experts=8, top_k=2, d_ff=4, shared_d_ff=6))
    ops = {
        op.name: op for op in layer_ops(shape, WORK._replace(axes=(("experts", 4),)), experts=True)
    }
    visits = 30 * 2
    # Two experts on each rank take what four ranks send: as much as each rank sends.
    assert (ops["expert up"].m, ops["expert up"].repeat) == (visits / 2, 2)
    assert ops["expert up"].flops + ops["expert down"].flops == 2 * visits * 3 * 8 * 4
    assert ops["shared up"].flops + ops["shared down"].flops == 2 * 30 * 3 * 8 * 6


def test_backward_by_kind() -> None:
    sizes = {"m": 4.0, "n": 3.0, "k": 2.0}
    forward = 2 * 4 * 3 * 2
    both = {
        kind: [Op("x", kind, **sizes).phase_flops(phase) for phase in ("input_grad", "weight_grad")]
        for kind in ("matmul", "batched", "attention", "elementwise")
    }
    assert both == {
        "matmul": [forward, forward],
        "batched": [2 * forward, 0],
        "attention": [2.5 * forward, 0],
        "elementwise": [0, 0],
    }


def test_bytes_of_a_product_are_its_operands() -> None:
    assert Op("x", "matmul", 4, 3, 2, repeat=5).phase_bytes("forward") == 5 * 2 * (8 + 6 + 12)


def test_adapters_move_what_their_products_hardly_compute() -> None:
    """Of 30 tokens, each with 8 numbers into queries, keys and values (8, 4, 4) and 8 into out."""
    plain, adapted = (
        layer_ops(SMALL, WORK._replace(frozen=frozen), experts=False) for frozen in (False, True)
    )
    (more,) = set(adapted) - set(plain)
    assert (more.kind, more.flops) == ("elementwise", 0)
    assert more.num_bytes == 30 * (7 * (8 + 8) + 8 * (8 + 4 + 4 + 8))

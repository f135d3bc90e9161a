"""A shape's parameters against those that the models list."""

import pytest

from weft.models.registry import FAMILIES, shape_of
from weft.models.shape import ExpertShape, LatentAttention, ModelShape

SIZES = [
    pytest.param(family, spec, id=f"{name}-{size}")
    for name, family in FAMILIES.items()
    for size, spec in family.sizes.items()
]


@pytest.mark.parametrize(("family", "spec"), SIZES)
def test_parameters_are_those_of_the_model(family, spec) -> None:
    listed = sum(param.numel for param in family.param_specs(spec))
    assert shape_of(spec).params == pytest.approx(listed, abs=0.01)


def test_experts_and_latent_attention_give_the_published_size() -> None:
    """DeepSeek V3: 671 billion (arXiv 2412.19437)."""
    shape = ModelShape(
        num_layers=61,
        d_model=7168,
        d_ff=18_432,
        num_heads=128,
        num_kv_heads=128,
        d_head=128,
        vocab_size=129_280,
        gated=True,
        experts=ExpertShape(num_experts=256, top_k=8, d_ff=2048, shared_d_ff=2048, dense_layers=3),
        latent=LatentAttention(q_rank=1536, kv_rank=512, d_nope=128, d_rope=64, d_value=128),
    )
    assert shape.params == pytest.approx(671e9, rel=2e-3)

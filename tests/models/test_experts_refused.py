"""Experts that no layer can have."""

from dataclasses import replace
from typing import Any

import pytest

from weft.config.errors import ConfigError
from weft.models.decoder_spec import expecting
from weft.models.registry import FAMILIES, check_spec
from weft.plan.model import ExpertsSpec, LatentSpec

ROW = FAMILIES["llama"].sizes["debug-moe-2m"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too many": (
        {"top_k": 9},
        "model.experts.top_k = 9: expected at most experts.count (8).",
    ),
    "unlike groups": (
        {"groups": 3},
        "model.experts.groups = 3: expected a divisor of experts.count (8).",
    ),
    "more groups than there are": (
        {"groups": 4, "top_groups": 5},
        "model.experts.top_groups = 5: expected at most experts.groups (4).",
    ),
    "no room for a token": (
        {"count": 8, "capacity": 0.03},
        "model.experts.capacity = 0.03: expected at least 0.04, so that an expert takes a token of "
        "a sample. It takes capacity x top_k x seq_len / count = 0.03 x 2 x 128 / 8.",
    ),
    "experts that choose none": (
        {"count": 129, "top_k": 1, "choice": "experts"},
        "model.experts.top_k = 1: expected at least 2, so that an expert takes a token of a "
        "sample. It takes top_k x seq_len / count = 1 x 128 / 129.",
    ),
    "a loss where loads are equal": (
        {"choice": "experts", "balance": 0.1},
        "model.experts.balance = 0.1: expected 0.0, as experts choose. Each expert takes as many "
        "tokens.",
    ),
    "a limit where experts choose": (
        {"choice": "experts", "capacity": 1.0},
        "model.experts.capacity = 1.0: expected null, as experts choose. Each expert takes as many "
        "tokens.",
    ),
    "a gate that never learns": (
        {"top_k": 1},
        "model.experts.normed = true: expected false with top_k 1. The share of its expert would "
        "be 1 for every token, so that no gate would learn.",
    ),
    "no layer with experts": (
        {"dense_layers": 3},
        "model.experts.dense_layers = 3: expected less than num_layers (3), so that some layer has "
        "experts. model.experts: null is a model without.",
    ),
    "more than groups have": (
        {"top_k": 3, "groups": 4},
        "model.experts.top_k = 3: expected at most 2, the experts of 1 groups.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_experts_that_no_layer_can_have(name: str) -> None:
    fields, message = REFUSED[name]
    experts = replace(ExpertsSpec(count=8, top_k=2), **fields)
    with pytest.raises(ConfigError) as caught:
        check_spec(replace(ROW, experts=experts))
    assert str(caught.value) == message


LATENT = FAMILIES["llama"].sizes["debug-deepseek-1m"]
IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "odd channels": (
        {"latent": LatentSpec(kv_rank=8, d_rope=7, d_value=8)},
        "model.latent.d_rope = 7: expected an even number below d_head (48), of which it is a "
        "part.",
    ),
    "fewer keys": (
        {"num_kv_heads": 2},
        "model.num_kv_heads = 2: expected num_heads (4), as latent attention has a key for each.",
    ),
    "norms of queries": (
        {"qk_norm": True},
        "model.qk_norm = true: expected false with model.latent.",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_low_ranks_that_cannot_be(name: str) -> None:
    fields, message = IMPOSSIBLE[name]
    with pytest.raises(ConfigError) as caught:
        check_spec(replace(LATENT, **fields))
    assert str(caught.value) == message


def test_norms_over_all_heads_are_norms() -> None:
    with pytest.raises(
        ConfigError, match=r"false, as without model\.qk_norm there are no such norms"
    ):
        check_spec(replace(ROW, norms_all_heads=True))


def test_loads_that_cannot_be() -> None:
    assert ROW.experts is not None
    wanted = replace(ROW, experts=replace(ROW.experts, imbalance=4.0))
    assert expecting(ROW, 4.0) == wanted != ROW
    limited = replace(ROW, experts=replace(ROW.experts, capacity=1.25))
    for spec, wrong, expected in (
        (ROW, 4.5, "1 to 4. An expert that every token visits, or that is full, has no more."),
        (
            limited,
            2.0,
            "1 to 1.25. An expert that every token visits, or that is full, has no more.",
        ),
        (FAMILIES["llama"].sizes["debug-1m"], 2.0, "1 where no token chooses experts."),
    ):
        with pytest.raises(ConfigError) as refused:
            expecting(spec, wrong)
        assert str(refused.value) == f"plan.expert_imbalance = {wrong}: expected {expected}"

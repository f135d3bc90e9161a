"""Experts that no layer can have."""

from dataclasses import replace
from typing import Any

import pytest

from weft.config.errors import ConfigError
from weft.models.registry import FAMILIES, check_spec
from weft.plan.model import ExpertsSpec

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


def test_norms_over_all_heads_are_norms() -> None:
    with pytest.raises(
        ConfigError, match=r"false, as without model\.qk_norm there are no such norms"
    ):
        check_spec(replace(ROW, norms_all_heads=True))

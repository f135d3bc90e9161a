"""Sizes of a decoder-only transformer, and what no such model can be. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from weft.config.errors import ConfigError
from weft.plan.model import ModelSpec, RopeScaling


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSpec(ModelSpec):
    """Sizes of a decoder-only transformer; one row of a family's sizes table."""

    d_ff: int
    d_head: int
    num_heads: int
    num_kv_heads: int
    norm_eps: float
    tied: bool
    """The head multiplies by the embedding's weight."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False

    def reduced(self) -> Self:
        d_head = 4
        return replace(
            self,
            d_model=self.num_heads * d_head,
            d_ff=2 * self.num_heads * d_head,
            d_head=d_head,
            num_layers=min(self.num_layers, 4),
            vocab_size=97,
            seq_len=32,
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        scaling = data.get("rope_scaling")
        return cls(**{**data, "rope_scaling": None if scaling is None else RopeScaling(**scaling)})


def check_decoder(spec: DecoderSpec) -> None:
    """Refuse, as ConfigError, a shape that no decoder can have."""
    sizes = {
        "d_model": spec.d_model,
        "d_ff": spec.d_ff,
        "d_head": spec.d_head,
        "num_layers": spec.num_layers,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"model.{name}", value, "an integer >= 1")
    if spec.vocab_size < 2:
        raise ConfigError("data.vocab_size", spec.vocab_size, "an integer >= 2")
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigError(
            "model.num_kv_heads", spec.num_kv_heads, f"a divisor of num_heads ({spec.num_heads})"
        )
    if not 0 <= spec.dropout < 1:
        raise ConfigError("model.dropout", spec.dropout, "a number >= 0 and < 1")

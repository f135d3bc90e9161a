"""What a plan knows of a model: its sizes and its parameters by logical name. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Llama 3.1's stretching of rotary positions beyond the length first trained on.

    A pair of channels that turns fewer than ``low_freq_factor`` times in ``original_seq_len``
    tokens is slowed by ``factor``, one that turns more than ``high_freq_factor`` times is kept.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_seq_len: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Sizes of a decoder-only transformer; one row of a family's sizes table."""

    family: str
    """Folder under ``weft.models``."""
    d_model: int
    d_ff: int
    d_head: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    seq_len: int
    """Longest sequence the model is meant for; the size of a learned position table."""
    norm_eps: float
    tied: bool
    """The head multiplies by the embedding's weight."""
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    dropout: float = 0.0

    def splits_over(self, tp: int) -> bool:
        """Every tensor-parallel rank gets work: a key head, or equal numbers of queries of one."""
        most = min(self.num_heads, self.seq_len, self.vocab_size, self.d_ff)
        per_key = self.num_heads // self.num_kv_heads
        whole_keys = tp <= self.num_kv_heads
        shared = tp % self.num_kv_heads == 0 and per_key % (tp // self.num_kv_heads) == 0
        return 1 <= tp <= most and (whole_keys or shared)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ModelSpec:
        """What ``dataclasses.asdict`` gave. Raises TypeError for fields that do not fit."""
        scaling = data.get("rope_scaling")
        return ModelSpec(
            **{**data, "rope_scaling": None if scaling is None else RopeScaling(**scaling)}
        )


@dataclass(frozen=True, slots=True)
class Init:
    """How a parameter starts. ``std`` is used by ``normal`` alone."""

    kind: Literal["normal", "ones", "zeros"]
    std: float = 0.0


Part = int | Literal["embed", "head"]
"""Where a parameter is used: a layer's number, the embedding, or the head with its final norm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """One logical parameter: every rank knows all of them, whatever it holds itself."""

    name: str
    """Dotted name in the unsplit model, e.g. ``layers.3.attn.q.weight``."""
    shape: tuple[int, ...]
    part: Part
    init: Init
    decay: bool
    """Weight decay applies: matrices, not norms, biases or embeddings."""
    also: tuple[Part, ...] = ()
    """Further parts that use the same parameter (a tied head, a shared layer)."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

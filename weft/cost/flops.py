"""Floating-point operations of a decoder-only transformer."""

from __future__ import annotations

from weft.plan.model import ModelSpec


def forward_flops_per_token(spec: ModelSpec, seq_len: int) -> float:
    """Model FLOPs of one token's forward pass in sequences of ``seq_len``.

    Matrix products alone, a multiply and an add counted apart; attention looks back at half the
    sequence on average. The head counts, embedding look-ups do not.
    """
    attention = spec.d_head * (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.d_model
    num_matrices = 2 if spec.family == "gpt2" else 3
    feed_forward = num_matrices * spec.d_model * spec.d_ff
    scores = 2 * (seq_len / 2) * spec.num_heads * spec.d_head
    per_layer = 2 * (attention + feed_forward + scores)
    return spec.num_layers * per_layer + 2 * spec.d_model * spec.vocab_size


def train_flops_per_token(spec: ModelSpec, seq_len: int) -> float:
    """Forward and backward of one token: backward costs twice the forward. No recompute."""
    return 3 * forward_flops_per_token(spec, seq_len)

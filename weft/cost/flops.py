"""Floating-point operations of a decoder-only transformer."""

from __future__ import annotations

from weft.models.registry import shape_of
from weft.plan.model import ModelSpec


def forward_flops_per_token(spec: ModelSpec, seq_len: int) -> float:
    """Model FLOPs of one token's forward pass in sequences of ``seq_len``.

    Matrix products alone, a multiply and an add counted apart; causal attention looks back at half
    the sequence on average. The head counts, embedding look-ups do not.
    """
    shape, dense = shape_of(spec), spec.num_layers
    width: float = shape.d_ff * dense  # of all layers together
    if shape.experts is not None:  # of those that a token visits, and the gate
        visited = shape.experts.num_experts / shape.num_matrices
        visited += shape.experts.top_k * shape.experts.d_ff + shape.experts.shared_d_ff
        dense = min(shape.experts.dense_layers, spec.num_layers)
        width = shape.d_ff * dense + visited * (spec.num_layers - dense)
    feed_forward = shape.num_matrices * shape.d_model * width
    scores = seq_len * shape.seen * shape.num_heads * (shape.key_width + shape.value_width)
    attention = spec.num_layers * (shape.attention_params + scores)
    return 2 * (attention + feed_forward + shape.table_params)


def pairs_of_a_token(spec: ModelSpec) -> int:
    """What a token costs beside attention, in pairs of tokens of which one attends to the other."""
    alone, pair = forward_flops_per_token(spec, 0), forward_flops_per_token(spec, 2)
    return round(alone / (pair - alone))


def train_flops_per_token(spec: ModelSpec, seq_len: int) -> float:
    """Forward and backward of one token: backward costs twice the forward. No recompute."""
    return 3 * forward_flops_per_token(spec, seq_len)

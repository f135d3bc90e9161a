"""What a configuration may say of a decoder besides its size. No torch."""

from __future__ import annotations

from weft.config.sections import Count, Fraction, ModelConfig


class DecoderConfig(ModelConfig):
    """The model: a family, a row of its table of sizes, and what differs from that row."""

    d_model: Count | None = None
    """Width of the hidden state; null takes the row's value, as for every field below."""
    d_ff: Count | None = None
    """Width inside the feed-forward block."""
    d_head: Count | None = None
    """Width of one attention head."""
    num_layers: Count | None = None
    """Decoder blocks."""
    num_heads: Count | None = None
    """Query heads."""
    num_kv_heads: Count | None = None
    """Key and value heads; a divisor of num_heads."""
    dropout: Fraction | None = None
    """Part of the activations dropped in training."""

"""What a configuration may say of a Llama, besides what it may say of every decoder. No torch."""

from __future__ import annotations

from pydantic import Field, create_model

from weft.config.values import Count, Flag, Positive, Section
from weft.models.decoder_spec import DecoderConfig


class RopeScalingConfig(Section):
    """Llama 3.1's stretching of rotary positions beyond the length first trained on."""

    factor: Positive
    """How many times pairs of channels that turn slowly are slowed."""
    low_freq_factor: Positive
    """Pairs that turn fewer times than this in original_seq_len tokens are slowed in full."""
    high_freq_factor: Positive
    """Pairs that turn more often than this are kept."""
    original_seq_len: Count
    """Tokens of the samples first trained on."""


LlamaConfig = create_model(
    "LlamaConfig",
    __base__=DecoderConfig,
    __doc__="The model: a Llama, a row of its table of sizes, and what differs from that row.",
    rope_theta=(
        Positive | None,
        Field(
            None,
            description="Base of the rotary positions: 10000 in Llama 2, 500000 in Llama 3.",
        ),
    ),
    rope_scaling=(
        RopeScalingConfig | None,
        Field(
            None,
            description="How positions are stretched; null is the row's way; without a row, none.",
        ),
    ),
    qkv_bias=(
        Flag | None,
        Field(None, description="Queries, keys and values have a bias, as in Qwen 2.5."),
    ),
    qk_norm=(
        Flag | None,
        Field(None, description="Queries and keys are normed, as in Qwen 3."),
    ),
)

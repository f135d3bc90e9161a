"""What a configuration may say of a Llama, besides what it may say of every decoder. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, create_model

from weft.config.values import Count, Flag, Positive, Section
from weft.models.decoder_spec import DecoderConfig


class RopeScalingConfig(Section):
    """Stretching of rotary positions beyond the length first trained on; kinds and numbers are
    those of Hugging Face's rope_scaling."""

    kind: Literal["linear", "dynamic", "yarn", "llama3"] = "llama3"
    """"linear" slows all pairs of channels alike, "dynamic" (NTK) the slow ones more and as far as
    samples are longer, "yarn" (NTK by parts, and sharper attention) and "llama3" those that turn
    seldom."""
    factor: Positive
    """How many times pairs of channels that turn slowly are slowed."""
    original_seq_len: Count | None = None
    """Tokens of the samples first trained on; all kinds but "linear" need it."""
    low_freq_factor: Positive = 1.0
    """Of "llama3": pairs that turn fewer times than this in original_seq_len tokens are slowed in
    full."""
    high_freq_factor: Positive = 4.0
    """Of "llama3": pairs that turn more often than this are kept."""
    beta_fast: Positive = 32.0
    """Of "yarn": pairs that turn more often than this in original_seq_len tokens are kept."""
    beta_slow: Positive = 1.0
    """Of "yarn": pairs that turn fewer times than this are slowed in full."""
    attention_factor: Positive | None = None
    """Of "yarn": what queries and keys are multiplied by; null is 0.1 ln(factor) + 1, and 1 leaves
    NTK by parts."""
    truncate: Flag = True
    """Of "yarn": the ramp begins and ends at whole pairs."""


class LatentConfig(Section):
    """Attention whose queries, keys and values come through low ranks (MLA, arXiv 2405.04434);
    model.d_head is then the width of a head's query and key, with those channels that have a
    position."""

    kv_rank: Count
    """Channels that keys and values of all heads are made of."""
    q_rank: Annotated[int, Field(ge=0)] = 0
    """Likewise queries; 0: they are made of the hidden state."""
    d_rope: Count
    """Channels of a head's query and key that have a position; keys have one set for all heads."""
    d_value: Count
    """Width of a head's value."""


class ExpertsConfig(Section):
    """Experts in place of a layer's feed-forward; none of a token's choices is dropped, unless
    capacity says so."""

    count: Count
    """Experts of a layer."""
    top_k: Count
    """Experts that each token goes to; where experts choose, on average."""
    choice: Literal["tokens", "experts"] = "tokens"
    """Who chooses: each token its experts, or each expert its tokens of every sample, those with
    the greatest scores, top_k data.seq_len / count of them (arXiv 2202.09368). A token's way then
    depends on later ones too."""
    capacity: Positive | None = None
    """An expert takes so many times its even share of a sample, capacity top_k data.seq_len / count
    choices, the earliest ones, and the others are dropped. null: it takes all."""
    d_ff: Annotated[int, Field(ge=0)] = 0
    """Width of each; 0: model.d_ff."""
    dense_layers: Annotated[int, Field(ge=0)] = 0
    """The first so many layers have an ordinary feed-forward, model.d_ff wide."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What a gate makes of its logits: over all experts, or of each by itself."""
    normed: Flag = True
    """The shares of a token's experts add up to one; false where it goes to one alone."""
    groups: Count = 1
    """Consecutive experts, as many in each."""
    top_groups: Count = 1
    """Groups that a token's experts are of: those whose two greatest scores add up to most."""
    scale: Positive = 1.0
    """Shares are multiplied by it."""
    bias_step: Annotated[float, Field(ge=0)] | None = None
    """By how much each step moves a bias of every expert, up where fewer tokens than the mean have
    chosen it, over the whole job, and down where more: with it scores choose, and shares are
    without (arXiv 2408.15664). 0: it stays. null: there is none."""
    shared_d_ff: Annotated[int, Field(ge=0)] = 0
    """Width of an expert that every token visits besides; 0: none."""
    shared_gate: Flag = True
    """That one's result is multiplied by what a gate of its own says (Qwen 1.5 MoE)."""
    balance: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the loss of unequal loads, of each sample by itself: no plan changes it."""
    z: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the loss of large logits of the gate."""


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
    norms_all_heads=(
        Flag | None,
        Field(None, description="With qk_norm: all heads together, as in OLMoE, not each."),
    ),
    latent=(
        LatentConfig | None,
        Field(None, description="Attention through low ranks; null is the row's; else none."),
    ),
    experts=(
        ExpertsConfig | None,
        Field(None, description="A mixture of experts; null is the row's; without a row, none."),
    ),
)

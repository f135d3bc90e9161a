"""Sizes of a decoder-only transformer, as asked for and in full. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil, inf, isfinite
from typing import Any, Self

from weft.config.errors import ConfigError, show
from weft.config.sections import ModelConfig
from weft.config.values import Count, Depth, Flag, Fraction, Positive
from weft.plan.model import ExpertsSpec, LatentSpec, ModelSpec, RopeScaling


class DecoderConfig(ModelConfig):
    """The model: a family, a row of its table of sizes, and what differs from that row."""

    d_model: Count | None = None
    """Width of the hidden state; null takes the row's value, as for every field below."""
    d_ff: Count | None = None
    """Width inside the feed-forward block."""
    d_head: Count | None = None
    """Width of one attention head."""
    num_layers: Depth | None = None
    """Decoder blocks."""
    num_heads: Count | None = None
    """Query heads."""
    num_kv_heads: Count | None = None
    """Key and value heads; a divisor of num_heads."""
    dropout: Fraction | None = None
    """Part of the activations dropped in training."""
    norm_eps: Positive | None = None
    """Added to the mean square (of RMSNorm) or the variance (of LayerNorm) before its root."""
    tied: Flag | None = None
    """The head multiplies by the embedding's weight."""


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
    norms_all_heads: bool = False
    """With ``qk_norm``: over the channels of all heads together, not of each by itself."""
    latent: LatentSpec | None = None
    """Attention through low ranks: then ``d_head`` is of queries and keys, with those of their
    channels that have a position."""
    experts: ExpertsSpec | None = None

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        """Those of a layer; None: it has a feed-forward."""
        return None if self.experts is None or layer < self.experts.dense_layers else self.experts

    def reduced(self) -> Self:
        d_head, seq_len, low, experts = 4, 32, self.latent, self.experts
        if low is not None:
            d_head = 6
            low = replace(low, kv_rank=6, q_rank=5 if low.q_rank else 0, d_rope=4, d_value=3)
        if experts is not None:
            dense, width = min(experts.dense_layers, 1), 8 if experts.d_ff else 0
            experts = replace(experts, dense_layers=dense, d_ff=width)
            while experts.room(seq_len) == 0:
                seq_len *= 2
        return replace(
            self,
            latent=low,
            experts=experts,
            d_model=4 * self.num_heads,
            d_ff=8 * self.num_heads,
            d_head=d_head,
            num_layers=min(self.num_layers, 4),
            vocab_size=97,
            seq_len=seq_len,
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        kinds = {"rope_scaling": RopeScaling, "latent": LatentSpec, "experts": ExpertsSpec}
        said = {
            name: kind(**data[name]) for name, kind in kinds.items() if data.get(name) is not None
        }
        return cls(**{**data, **said})


def check_latent(spec: DecoderSpec) -> None:
    """Refuse, as ConfigError, attention through low ranks that cannot be."""
    low = spec.latent
    assert low is not None, "a shape without low ranks"
    if low.d_rope % 2 or low.d_rope >= spec.d_head:
        expected = f"an even number below d_head ({spec.d_head}), of which it is a part"
        raise ConfigError("model.latent.d_rope", low.d_rope, expected)
    if spec.num_kv_heads != spec.num_heads:
        expected = f"num_heads ({spec.num_heads}), as latent attention has a key for each"
        raise ConfigError("model.num_kv_heads", spec.num_kv_heads, expected)
    for name in ("qkv_bias", "qk_norm"):
        if asdict(spec)[name]:
            raise ConfigError(f"model.{name}", True, "false with model.latent")


def check_experts(experts: ExpertsSpec, spec: DecoderSpec) -> None:
    """Refuse, as ConfigError, experts that no layer of a model can have."""
    if experts.dense_layers >= spec.num_layers:
        expected = f"less than num_layers ({spec.num_layers}), so that some layer has experts"
        hint = "model.experts: null is a model without."
        raise ConfigError("model.experts.dense_layers", experts.dense_layers, expected, hint)
    if experts.top_k > experts.count:
        expected = f"at most experts.count ({experts.count})"
        raise ConfigError("model.experts.top_k", experts.top_k, expected)
    if experts.count % experts.groups:
        expected = f"a divisor of experts.count ({experts.count})"
        raise ConfigError("model.experts.groups", experts.groups, expected)
    if experts.top_groups > experts.groups:
        expected = f"at most experts.groups ({experts.groups})"
        raise ConfigError("model.experts.top_groups", experts.top_groups, expected)
    reached = experts.count // experts.groups * experts.top_groups
    if experts.top_k > reached:
        expected = f"at most {reached}, the experts of {experts.top_groups} groups"
        raise ConfigError("model.experts.top_k", experts.top_k, expected)
    if experts.top_k == 1 < experts.count and experts.normed and experts.choice == "tokens":
        hint = "The share of its expert would be 1 for every token, so that no gate would learn."
        raise ConfigError("model.experts.normed", True, "false with top_k 1", hint)
    _check_room(experts, spec.seq_len)


def _check_room(experts: ExpertsSpec, seq_len: int) -> None:
    """An expert takes a token of each sample at least; where it chooses them, loads are equal."""
    if experts.choice == "experts":
        said, usual = asdict(experts), ExpertsSpec(count=1, top_k=1)
        for name in ("capacity", "groups", "bias_step", "balance"):
            if said[name] != asdict(usual)[name]:
                hint = "Each expert takes as many tokens."
                expected = f"{show(asdict(usual)[name])}, as experts choose"
                raise ConfigError(f"model.experts.{name}", said[name], expected, hint)
    if experts.room(seq_len) != 0:
        return
    even = f"{experts.top_k} x {seq_len} / {experts.count}"
    if experts.choice == "experts":
        least = -(-experts.count // seq_len)
        expected = f"at least {least}, so that an expert takes a token of a sample"
        hint = f"It takes top_k x seq_len / count = {even}."
        raise ConfigError("model.experts.top_k", experts.top_k, expected, hint)
    share = ceil(100 * experts.count / (experts.top_k * seq_len)) / 100
    expected = f"at least {share}, so that an expert takes a token of a sample"
    hint = f"It takes capacity x top_k x seq_len / count = {experts.capacity} x {even}."
    raise ConfigError("model.experts.capacity", experts.capacity, expected, hint)


def expecting(spec: ModelSpec, imbalance: float) -> ModelSpec:
    """The model, whose most visited experts are expected to have so many times the mean.

    Raises:
        ConfigError: they cannot.
    """
    if imbalance == 1:
        return spec
    key = "plan.expert_imbalance"
    if not isinstance(spec, DecoderSpec) or not spec.experts or spec.experts.choice == "experts":
        raise ConfigError(key, imbalance, "1 where no token chooses experts")
    experts = spec.experts
    most = min(experts.count / experts.top_k, experts.capacity or inf)
    if imbalance > most:
        hint = "An expert that every token visits, or that is full, has no more."
        raise ConfigError(key, imbalance, f"1 to {most:g}", hint)
    return replace(spec, experts=replace(experts, imbalance=imbalance))


def check_decoder(spec: DecoderSpec) -> None:
    """Refuse, as ConfigError, a shape that no decoder can have."""
    sizes = asdict(spec)
    for name in ("d_model", "d_ff", "d_head", "num_layers", "num_heads", "num_kv_heads"):
        if sizes[name] < 1:
            raise ConfigError(f"model.{name}", sizes[name], "an integer >= 1")
    if spec.vocab_size < 2:
        raise ConfigError("data.vocab_size", spec.vocab_size, "an integer >= 2")
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigError(
            "model.num_kv_heads", spec.num_kv_heads, f"a divisor of num_heads ({spec.num_heads})"
        )
    if not 0 <= spec.dropout < 1:
        raise ConfigError("model.dropout", spec.dropout, "a number >= 0 and < 1")
    for name in ("norm_eps", "rope_theta"):
        if not (sizes[name] > 0 and isfinite(sizes[name])):
            raise ConfigError(f"model.{name}", sizes[name], "a finite number > 0")

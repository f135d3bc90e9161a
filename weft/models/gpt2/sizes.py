"""GPT-2 shapes as published, and the parameters that follow from a shape. No torch."""

from __future__ import annotations

from dataclasses import replace

from weft.config.errors import ConfigError
from weft.models.decoder_spec import DecoderSpec, check_decoder
from weft.models.params import branch_std, embedding_std, head, initial_std, matrix, table, vector
from weft.plan.model import ParamSpec, UnitName

_SMALL = DecoderSpec(
    family="gpt2",
    d_model=768,
    d_ff=3072,
    d_head=64,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    vocab_size=50257,
    seq_len=1024,
    norm_eps=1e-5,
    tied=True,
    dropout=0.1,
)


def _row(d_model: int, num_layers: int, *, d_head: int = 64) -> DecoderSpec:
    heads = d_model // d_head
    return replace(
        _SMALL,
        d_model=d_model,
        d_ff=4 * d_model,
        d_head=d_head,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads,
    )


SIZES: dict[str, DecoderSpec] = {
    "debug-1m": replace(_row(128, 4, d_head=32), vocab_size=2048, seq_len=128, dropout=0.0),
    "demo-5m": replace(_row(256, 5), vocab_size=4096, seq_len=256, dropout=0.0),
    "small": _SMALL,
    "medium": _row(1024, 24),
    "large": _row(1280, 36),
    "xl": _row(1600, 48),
}
"""Rows by name. The published ones: Radford et al. 2019, table 2."""


def param_specs(spec: DecoderSpec) -> list[ParamSpec]:
    """Every parameter of the unsplit model, in the order of the forward pass."""
    specs = [
        table("embed.weight", spec.vocab_size, spec, std=embedding_std(spec), tied=spec.tied),
        table("positions.weight", spec.seq_len, spec, std=initial_std(spec)),
    ]
    for layer in range(spec.num_layers):
        specs += _block_specs(spec, layer)
    return [*specs, *_norm("norm.", spec.d_model, "head"), *head(spec)]


def check(spec: DecoderSpec) -> None:
    """Refuse what a GPT-2 cannot be."""
    check_decoder(spec)
    if spec.num_kv_heads != spec.num_heads:
        expected = f"{spec.num_heads} (num_heads), as this family shares no key heads"
        raise ConfigError("model.num_kv_heads", spec.num_kv_heads, expected)


def _block_specs(spec: DecoderSpec, layer: int) -> list[ParamSpec]:
    d_model, width = spec.d_model, spec.num_heads * spec.d_head
    prefix, std, out_std = f"layers.{layer}.", initial_std(spec), branch_std(spec)

    def linear(name: str, shape: tuple[int, int], std: float) -> list[ParamSpec]:
        weight = matrix(f"{prefix}{name}.weight", shape, layer, std)
        return [weight, vector(f"{prefix}{name}.bias", shape[0], layer, "zeros")]

    return [
        *_norm(prefix + "attn_norm.", d_model, layer),
        *linear("attn.q", (width, d_model), std),
        *linear("attn.k", (width, d_model), std),
        *linear("attn.v", (width, d_model), std),
        *linear("attn.o", (d_model, width), out_std),
        *_norm(prefix + "ff_norm.", d_model, layer),
        *linear("ff.up", (spec.d_ff, d_model), std),
        *linear("ff.down", (d_model, spec.d_ff), out_std),
    ]


def _norm(prefix: str, size: int, unit: UnitName) -> list[ParamSpec]:
    names = (prefix + "weight", prefix + "bias")
    return [vector(names[0], size, unit, "ones"), vector(names[1], size, unit, "zeros")]

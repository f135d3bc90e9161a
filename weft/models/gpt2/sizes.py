"""GPT-2 shapes as published, and what no such shape can be. No torch."""

from __future__ import annotations

from dataclasses import replace

from weft.config.errors import ConfigError
from weft.models.decoder_spec import DecoderSpec, check_decoder

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


def check(spec: DecoderSpec) -> None:
    """Refuse what a GPT-2 cannot be."""
    check_decoder(spec)
    if spec.num_kv_heads != spec.num_heads:
        expected = f"{spec.num_heads} (num_heads), as this family shares no key heads"
        raise ConfigError("model.num_kv_heads", spec.num_kv_heads, expected)

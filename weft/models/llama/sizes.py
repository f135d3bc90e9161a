"""Llama shapes as published, and the parameters that follow from a shape. No torch."""

from __future__ import annotations

import math
from dataclasses import replace

from weft.config.errors import ConfigError
from weft.plan.model import Init, ModelSpec, ParamSpec, Part

_DEBUG = ModelSpec(
    family="llama",
    d_model=128,
    d_ff=352,
    d_head=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=2048,
    seq_len=128,
    norm_eps=1e-5,
    tied=False,
)

SIZES: dict[str, ModelSpec] = {
    "debug-1m": _DEBUG,
    "demo-6m": replace(
        _DEBUG,
        d_model=256,
        d_ff=704,
        num_layers=6,
        num_heads=8,
        num_kv_heads=4,
        vocab_size=4096,
        seq_len=256,
    ),
}


def param_specs(spec: ModelSpec) -> list[ParamSpec]:
    """Every parameter of the unsplit model, in the order of the forward pass."""
    d_model, std = spec.d_model, initial_std(spec)
    specs = [
        ParamSpec(
            name="embed.weight",
            shape=(spec.vocab_size, d_model),
            part="embed",
            init=Init("normal", std),
            decay=False,
            also=("head",) if spec.tied else (),
        )
    ]
    for layer in range(spec.num_layers):
        specs += _block_specs(spec, layer)
    specs.append(_vector("norm.weight", d_model, "head", Init("ones")))
    if not spec.tied:
        specs.append(_matrix("head.weight", (spec.vocab_size, d_model), "head", std))
    return specs


def initial_std(spec: ModelSpec) -> float:
    """Standard deviation of a matrix at the start."""
    return math.sqrt(2 / (5 * spec.d_model))


def _block_specs(spec: ModelSpec, layer: int) -> list[ParamSpec]:
    d_model, d_ff, std = spec.d_model, spec.d_ff, initial_std(spec)
    d_q, d_kv = spec.num_heads * spec.d_head, spec.num_kv_heads * spec.d_head
    out_std = std / math.sqrt(2 * spec.num_layers)  # the sum of all branches keeps its size
    prefix = f"layers.{layer}."
    specs = [_vector(prefix + "attn_norm.weight", d_model, layer, Init("ones"))]
    for name, width in (("q", d_q), ("k", d_kv), ("v", d_kv)):
        specs.append(_matrix(f"{prefix}attn.{name}.weight", (width, d_model), layer, std))
        if spec.qkv_bias:
            specs.append(_vector(f"{prefix}attn.{name}.bias", width, layer, Init("zeros")))
    if spec.qk_norm:
        specs += [
            _vector(f"{prefix}attn.{name}.weight", spec.d_head, layer, Init("ones"))
            for name in ("q_norm", "k_norm")
        ]
    return [
        *specs,
        _matrix(prefix + "attn.o.weight", (d_model, d_q), layer, out_std),
        _vector(prefix + "ff_norm.weight", d_model, layer, Init("ones")),
        _matrix(prefix + "ff.gate.weight", (d_ff, d_model), layer, std),
        _matrix(prefix + "ff.up.weight", (d_ff, d_model), layer, std),
        _matrix(prefix + "ff.down.weight", (d_model, d_ff), layer, out_std),
    ]


def _matrix(name: str, shape: tuple[int, int], part: Part, std: float) -> ParamSpec:
    return ParamSpec(name=name, shape=shape, part=part, init=Init("normal", std), decay=True)


def _vector(name: str, size: int, part: Part, init: Init) -> ParamSpec:
    return ParamSpec(name=name, shape=(size,), part=part, init=init, decay=False)


def check(spec: ModelSpec) -> None:
    """Refuse what a Llama cannot be."""
    if spec.d_head % 2:
        raise ConfigError("model.d_head", spec.d_head, "an even number (rotary positions)")
    if spec.dropout:
        raise ConfigError("model.dropout", spec.dropout, "0: this family has no dropout")

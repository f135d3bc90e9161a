"""Llama shapes as published, and the parameters that follow from a shape. No torch.

Qwen 2.5 differs by biases of q, k and v, Qwen 3 by norms of q and k; Aquila 2 is a Llama.
"""

from __future__ import annotations

from dataclasses import replace

from weft.config.errors import ConfigError
from weft.models.decoder_spec import DecoderSpec, check_decoder
from weft.models.params import branch_std, embedding_std, head, initial_std, matrix, table, vector
from weft.plan.model import ParamSpec, RopeScaling

_LLAMA_2 = DecoderSpec(
    family="llama",
    d_model=4096,
    d_ff=11008,
    d_head=128,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    vocab_size=32_000,
    seq_len=4096,
    norm_eps=1e-5,
    tied=False,
)
_LLAMA_3 = replace(_LLAMA_2, vocab_size=128_256, seq_len=8192, rope_theta=500_000.0)
_QWEN_2_5_SMALL = replace(
    _LLAMA_2,
    vocab_size=151_936,
    seq_len=32_768,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    qkv_bias=True,
    tied=True,
)
_QWEN_2_5 = replace(_QWEN_2_5_SMALL, vocab_size=152_064, seq_len=131_072, norm_eps=1e-5, tied=False)
_QWEN_3 = replace(
    _QWEN_2_5_SMALL, num_kv_heads=8, seq_len=40_960, qkv_bias=False, qk_norm=True, tied=False
)
_AQUILA_2 = replace(_LLAMA_2, vocab_size=100_008, num_kv_heads=8)


def _small() -> dict[str, DecoderSpec]:
    """Ours, to learn something in seconds or minutes on a laptop."""
    debug = replace(
        _LLAMA_2,
        d_model=128,
        d_ff=352,
        d_head=32,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=2048,
        seq_len=128,
    )
    demo = replace(
        debug,
        d_model=256,
        d_ff=704,
        d_head=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=4096,
        seq_len=256,
    )
    return {"debug-1m": debug, "demo-5m": demo}


def _sized(
    base: DecoderSpec,
    d_model: int,
    *,
    d_ff: int,
    layers: int,
    heads: int,
    kv_heads: int,
    d_head: int = 128,
) -> DecoderSpec:
    return replace(
        base,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        d_head=d_head,
    )


def _llamas() -> dict[str, DecoderSpec]:
    """arXiv 2307.09288, 2407.21783 table 3, 2401.02385; the config.json files of Llama 3.2."""
    tiny = _sized(_LLAMA_2, 2048, d_ff=5632, layers=22, heads=32, kv_heads=4, d_head=64)
    huge = _sized(_LLAMA_3, 16_384, d_ff=53_248, layers=126, heads=128, kv_heads=8)
    small = replace(_stretched(_LLAMA_3, 32.0), tied=True)
    return {
        "tinyllama-1.1b": replace(tiny, seq_len=2048),
        "llama2-7b": _LLAMA_2,
        "llama2-13b": _sized(_LLAMA_2, 5120, d_ff=13_824, layers=40, heads=40, kv_heads=40),
        "llama2-70b": _sized(_LLAMA_2, 8192, d_ff=28_672, layers=80, heads=64, kv_heads=8),
        "llama3-8b": _sized(_LLAMA_3, 4096, d_ff=14_336, layers=32, heads=32, kv_heads=8),
        "llama3-70b": _sized(_LLAMA_3, 8192, d_ff=28_672, layers=80, heads=64, kv_heads=8),
        "llama3-405b": _stretched(huge, 8.0),
        "llama3.2-1b": _sized(small, 2048, d_ff=8192, layers=16, heads=32, kv_heads=8, d_head=64),
        "llama3.2-3b": _sized(small, 3072, d_ff=8192, layers=28, heads=24, kv_heads=8),
    }


def _stretched(base: DecoderSpec, factor: float) -> DecoderSpec:
    """Llama 3.1 and 3.2: 131072 tokens, by rotary positions stretched from 8192."""
    scaling = RopeScaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=8192
    )
    return replace(base, seq_len=131_072, rope_scaling=scaling)


def _qwens() -> dict[str, DecoderSpec]:
    """arXiv 2412.15115 table 1, 2505.09388 table 1; widths from their config.json files."""
    small, large = _QWEN_2_5_SMALL, _QWEN_2_5
    tied = replace(_QWEN_3, tied=True)
    seven = _sized(large, 3584, d_ff=18_944, layers=28, heads=28, kv_heads=4)
    return {
        "qwen2.5-0.5b": _sized(small, 896, d_ff=4864, layers=24, heads=14, kv_heads=2, d_head=64),
        "qwen2.5-1.5b": _sized(small, 1536, d_ff=8960, layers=28, heads=12, kv_heads=2),
        "qwen2.5-3b": _sized(small, 2048, d_ff=11_008, layers=36, heads=16, kv_heads=2),
        "qwen2.5-7b": replace(seven, norm_eps=1e-6),
        "qwen2.5-14b": _sized(large, 5120, d_ff=13_824, layers=48, heads=40, kv_heads=8),
        "qwen2.5-32b": _sized(large, 5120, d_ff=27_648, layers=64, heads=40, kv_heads=8),
        "qwen2.5-72b": _sized(large, 8192, d_ff=29_568, layers=80, heads=64, kv_heads=8),
        "qwen3-0.6b": _sized(tied, 1024, d_ff=3072, layers=28, heads=16, kv_heads=8),
        "qwen3-1.7b": _sized(tied, 2048, d_ff=6144, layers=28, heads=16, kv_heads=8),
        "qwen3-4b": _sized(tied, 2560, d_ff=9728, layers=36, heads=32, kv_heads=8),
        "qwen3-8b": _sized(_QWEN_3, 4096, d_ff=12_288, layers=36, heads=32, kv_heads=8),
        "qwen3-14b": _sized(_QWEN_3, 5120, d_ff=17_408, layers=40, heads=40, kv_heads=8),
        "qwen3-32b": _sized(_QWEN_3, 5120, d_ff=25_600, layers=64, heads=64, kv_heads=8),
    }


def _aquilas() -> dict[str, DecoderSpec]:
    """arXiv 2408.07410; the training files of FlagScale, examples/aquila/conf/train."""
    seven = _sized(_AQUILA_2, 4096, d_ff=11_008, layers=32, heads=32, kv_heads=32)
    return {
        "aquila2-7b": replace(seven, seq_len=2048),
        "aquila2-34b": _sized(_AQUILA_2, 6144, d_ff=24_576, layers=60, heads=48, kv_heads=8),
        "aquila2-70b": _sized(_AQUILA_2, 8192, d_ff=28_672, layers=80, heads=64, kv_heads=8),
    }


SIZES: dict[str, DecoderSpec] = {**_small(), **_llamas(), **_qwens(), **_aquilas()}
"""Rows by name; ``vocab_size`` and ``seq_len`` as published."""


def param_specs(spec: DecoderSpec) -> list[ParamSpec]:
    """Every parameter of the unsplit model, in the order of the forward pass."""
    specs = [table("embed.weight", spec.vocab_size, spec, std=embedding_std(spec), tied=spec.tied)]
    for layer in range(spec.num_layers):
        specs += _block_specs(spec, layer)
    return [*specs, vector("norm.weight", spec.d_model, "head", "ones"), *head(spec)]


def check(spec: DecoderSpec) -> None:
    """Refuse what a Llama cannot be."""
    check_decoder(spec)
    if spec.d_head % 2:
        raise ConfigError("model.d_head", spec.d_head, "an even number (rotary positions)")
    if spec.dropout:
        raise ConfigError("model.dropout", spec.dropout, "0, as this family has no dropout")


def _block_specs(spec: DecoderSpec, layer: int) -> list[ParamSpec]:
    d_model, d_ff, std = spec.d_model, spec.d_ff, initial_std(spec)
    d_q, d_kv = spec.num_heads * spec.d_head, spec.num_kv_heads * spec.d_head
    prefix = f"layers.{layer}."
    specs = [vector(prefix + "attn_norm.weight", d_model, layer, "ones")]
    for name, width in (("q", d_q), ("k", d_kv), ("v", d_kv)):
        specs.append(matrix(f"{prefix}attn.{name}.weight", (width, d_model), layer, std))
        if spec.qkv_bias:
            specs.append(vector(f"{prefix}attn.{name}.bias", width, layer, "zeros"))
    specs.append(matrix(prefix + "attn.o.weight", (d_model, d_q), layer, branch_std(spec)))
    if spec.qk_norm:
        specs += [
            vector(f"{prefix}attn.{name}.weight", spec.d_head, layer, "ones")
            for name in ("q_norm", "k_norm")
        ]
    return [
        *specs,
        vector(prefix + "ff_norm.weight", d_model, layer, "ones"),
        matrix(prefix + "ff.gate.weight", (d_ff, d_model), layer, std),
        matrix(prefix + "ff.up.weight", (d_ff, d_model), layer, std),
        matrix(prefix + "ff.down.weight", (d_model, d_ff), layer, branch_std(spec)),
    ]

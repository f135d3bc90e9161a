"""Llama shapes as published, and what no such shape can be. No torch.

Qwen 2.5 differs by biases of q, k and v, Qwen 3 by norms of q and k; Aquila 2 is a Llama; Mixtral,
Qwen 1.5 MoE, Qwen 3 MoE and OLMoE have experts; DeepSeek-V3 and Moonlight latent attention too.
"""

from __future__ import annotations

from dataclasses import replace

from weft.config.errors import ConfigError
from weft.models.decoder_spec import (
    DecoderSpec,
    check_decoder,
    check_experts,
    check_latent,
)
from weft.models.llama.rope import check_rope
from weft.plan.model import ExpertsSpec, LatentSpec, RopeScaling

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


def _stretched(base: DecoderSpec, factor: float) -> DecoderSpec:
    """Llama 3.1 and 3.2: 131072 tokens, by rotary positions stretched from 8192."""
    scaling = RopeScaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=8192
    )
    return replace(base, seq_len=131_072, rope_scaling=scaling)


_MIXTRAL = replace(
    _LLAMA_2,
    seq_len=32_768,
    rope_theta=1_000_000.0,
    experts=ExpertsSpec(count=8, top_k=2, balance=0.02),
)
_QWEN_MOE = ExpertsSpec(count=60, top_k=4, normed=False, shared_d_ff=5632, balance=0.001)
_QWEN_3_MOE = ExpertsSpec(count=128, top_k=8, balance=0.001)
_OLMOE = replace(
    _LLAMA_2,
    vocab_size=50_304,
    qk_norm=True,
    norms_all_heads=True,
    experts=ExpertsSpec(count=64, top_k=8, normed=False, balance=0.01, z=0.001),
)
_DEEPSEEK = replace(
    _LLAMA_2,
    d_model=7168,
    d_ff=18_432,
    d_head=192,
    num_layers=61,
    num_heads=128,
    num_kv_heads=128,
    vocab_size=129_280,
    seq_len=163_840,
    norm_eps=1e-6,
    rope_scaling=RopeScaling(kind="yarn", factor=40.0, original_seq_len=4096),
    latent=LatentSpec(q_rank=1536, kv_rank=512, d_rope=64, d_value=128),
    experts=ExpertsSpec(
        count=256,
        top_k=8,
        d_ff=2048,
        dense_layers=3,
        scores="sigmoid",
        groups=8,
        top_groups=4,
        scale=2.5,
        bias_step=0.001,
        shared_d_ff=2048,
        shared_gate=False,
    ),
)
_MOONLIGHT = replace(
    _DEEPSEEK,
    d_model=2048,
    d_ff=11_264,
    num_layers=27,
    num_heads=16,
    num_kv_heads=16,
    vocab_size=163_840,
    seq_len=8192,
    norm_eps=1e-5,
    rope_theta=50_000.0,
    rope_scaling=None,
    latent=LatentSpec(kv_rank=512, d_rope=64, d_value=128),
    experts=ExpertsSpec(
        count=64,
        top_k=6,
        d_ff=1408,
        dense_layers=1,
        scores="sigmoid",
        scale=2.446,
        bias_step=0.001,
        shared_d_ff=2816,
        shared_gate=False,
    ),
)
_DEBUG_LATENT = replace(
    _MOONLIGHT,
    d_model=128,
    d_ff=352,
    d_head=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    vocab_size=2048,
    seq_len=128,
    rope_theta=10_000.0,
    latent=LatentSpec(q_rank=48, kv_rank=32, d_rope=16, d_value=32),
    experts=ExpertsSpec(
        count=16,
        top_k=4,
        d_ff=48,
        dense_layers=1,
        scores="sigmoid",
        groups=4,
        top_groups=2,
        scale=2.5,
        bias_step=0.001,
        shared_d_ff=48,
        shared_gate=False,
    ),
)
_DEBUG = replace(_LLAMA_2, vocab_size=2048, seq_len=128)
_DEMO = replace(_LLAMA_2, vocab_size=4096, seq_len=256)
_TINY = replace(_LLAMA_2, seq_len=2048)
_LLAMA_3_2 = replace(_stretched(_LLAMA_3, 32.0), tied=True)
_QWEN_3_TIED = replace(_QWEN_3, tied=True)

SIZES: dict[str, DecoderSpec] = {
    # Ours, to learn something in seconds or minutes on a laptop.
    "debug-1m": _sized(_DEBUG, 128, d_ff=352, layers=3, heads=4, kv_heads=2, d_head=32),
    "demo-5m": _sized(_DEMO, 256, d_ff=704, layers=4, heads=4, kv_heads=2, d_head=64),
    "debug-moe-2m": _sized(
        replace(_DEBUG, experts=ExpertsSpec(count=8, top_k=2, balance=0.01)),
        128,
        d_ff=176,
        layers=3,
        heads=4,
        kv_heads=2,
        d_head=32,
    ),
    "debug-deepseek-1m": _DEBUG_LATENT,
    # arXiv 2307.09288, 2407.21783 table 3, 2401.02385; the config.json files of Llama 3.2.
    "tinyllama-1.1b": _sized(_TINY, 2048, d_ff=5632, layers=22, heads=32, kv_heads=4, d_head=64),
    "llama2-7b": _LLAMA_2,
    "llama2-13b": _sized(_LLAMA_2, 5120, d_ff=13_824, layers=40, heads=40, kv_heads=40),
    "llama2-70b": _sized(_LLAMA_2, 8192, d_ff=28_672, layers=80, heads=64, kv_heads=8),
    "llama3-8b": _sized(_LLAMA_3, 4096, d_ff=14_336, layers=32, heads=32, kv_heads=8),
    "llama3-70b": _sized(_LLAMA_3, 8192, d_ff=28_672, layers=80, heads=64, kv_heads=8),
    "llama3-405b": _sized(
        _stretched(_LLAMA_3, 8.0), 16_384, d_ff=53_248, layers=126, heads=128, kv_heads=8
    ),
    "llama3.2-1b": _sized(_LLAMA_3_2, 2048, d_ff=8192, layers=16, heads=32, kv_heads=8, d_head=64),
    "llama3.2-3b": _sized(_LLAMA_3_2, 3072, d_ff=8192, layers=28, heads=24, kv_heads=8),
    # arXiv 2412.15115 table 1, 2505.09388 table 1; widths from their config.json files.
    "qwen2.5-0.5b": _sized(
        _QWEN_2_5_SMALL, 896, d_ff=4864, layers=24, heads=14, kv_heads=2, d_head=64
    ),
    "qwen2.5-1.5b": _sized(_QWEN_2_5_SMALL, 1536, d_ff=8960, layers=28, heads=12, kv_heads=2),
    "qwen2.5-3b": _sized(_QWEN_2_5_SMALL, 2048, d_ff=11_008, layers=36, heads=16, kv_heads=2),
    "qwen2.5-7b": _sized(
        replace(_QWEN_2_5, norm_eps=1e-6), 3584, d_ff=18_944, layers=28, heads=28, kv_heads=4
    ),
    "qwen2.5-14b": _sized(_QWEN_2_5, 5120, d_ff=13_824, layers=48, heads=40, kv_heads=8),
    "qwen2.5-32b": _sized(_QWEN_2_5, 5120, d_ff=27_648, layers=64, heads=40, kv_heads=8),
    "qwen2.5-72b": _sized(_QWEN_2_5, 8192, d_ff=29_568, layers=80, heads=64, kv_heads=8),
    "qwen3-0.6b": _sized(_QWEN_3_TIED, 1024, d_ff=3072, layers=28, heads=16, kv_heads=8),
    "qwen3-1.7b": _sized(_QWEN_3_TIED, 2048, d_ff=6144, layers=28, heads=16, kv_heads=8),
    "qwen3-4b": _sized(_QWEN_3_TIED, 2560, d_ff=9728, layers=36, heads=32, kv_heads=8),
    "qwen3-8b": _sized(_QWEN_3, 4096, d_ff=12_288, layers=36, heads=32, kv_heads=8),
    "qwen3-14b": _sized(_QWEN_3, 5120, d_ff=17_408, layers=40, heads=40, kv_heads=8),
    "qwen3-32b": _sized(_QWEN_3, 5120, d_ff=25_600, layers=64, heads=64, kv_heads=8),
    # arXiv 2408.07410; the training files of FlagScale, examples/aquila/conf/train.
    "aquila2-7b": _sized(
        replace(_AQUILA_2, seq_len=2048), 4096, d_ff=11_008, layers=32, heads=32, kv_heads=32
    ),
    "aquila2-34b": _sized(_AQUILA_2, 6144, d_ff=24_576, layers=60, heads=48, kv_heads=8),
    "aquila2-70b": _sized(_AQUILA_2, 8192, d_ff=28_672, layers=80, heads=64, kv_heads=8),
    # arXiv 2401.04088, 2505.09388 table 2; the config.json files of Qwen 1.5 MoE.
    "mixtral-8x7b": _sized(_MIXTRAL, 4096, d_ff=14_336, layers=32, heads=32, kv_heads=8),
    "mixtral-8x22b": _sized(
        replace(_MIXTRAL, seq_len=65_536, vocab_size=32_768),
        6144,
        d_ff=16_384,
        layers=56,
        heads=48,
        kv_heads=8,
    ),
    "qwen1.5-moe-a2.7b": _sized(
        replace(_QWEN_2_5, vocab_size=151_936, seq_len=8192, norm_eps=1e-6, experts=_QWEN_MOE),
        2048,
        d_ff=1408,
        layers=24,
        heads=16,
        kv_heads=16,
    ),
    "qwen3-30b-a3b": _sized(
        replace(_QWEN_3, experts=_QWEN_3_MOE), 2048, d_ff=768, layers=48, heads=32, kv_heads=4
    ),
    # arXiv 2409.02060 table 1.
    "olmoe-1b-7b": _sized(_OLMOE, 2048, d_ff=1024, layers=16, heads=16, kv_heads=16),
    # arXiv 2412.19437 section 4.2, without the layer that predicts a second token; 2502.16982.
    "deepseek-v3": _DEEPSEEK,
    "moonlight-16b-a3b": _MOONLIGHT,
}
"""Rows by name; ``vocab_size`` and ``seq_len`` as published."""


def check(spec: DecoderSpec) -> None:
    """Refuse what a Llama cannot be."""
    check_decoder(spec)
    if spec.latent is not None:
        check_latent(spec)
    elif spec.d_head % 2:
        raise ConfigError("model.d_head", spec.d_head, "an even number (rotary positions)")
    if spec.dropout:
        raise ConfigError("model.dropout", spec.dropout, "0, as this family has no dropout")
    check_rope(spec)
    if spec.norms_all_heads and not spec.qk_norm:
        expected = "false, as without model.qk_norm there are no such norms"
        raise ConfigError("model.norms_all_heads", True, expected)
    if spec.experts is not None:
        check_experts(spec.experts, spec)

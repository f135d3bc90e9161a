"""Llama, Qwen 2, Qwen 3, mixtures like them and DeepSeek-V3 as Hugging Face writes them. No
torch."""

from __future__ import annotations

from typing import Any

from weft.config.errors import ConfigError
from weft.models.config_json import Converter, Entry, Fields
from weft.models.decoder_spec import DecoderSpec
from weft.models.llama.mixtures import (
    DEEPSEEK,
    MIXTURES,
    MODEL_TYPES,
    expert_entries,
    expert_fields,
    read_experts,
)
from weft.models.llama.rope import read_rope, written_rope
from weft.plan.model import LatentSpec

_NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "ff_norm.weight": "post_attention_layernorm.weight",
}
_BLOCK = {
    **_NORMS,
    **{f"attn.{x}.weight": f"self_attn.{x}_proj.weight" for x in "qkvo"},
}
_LATENT = {
    **_NORMS,
    "attn.kv_down.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn.kv_up.weight": "self_attn.kv_b_proj.weight",
    "attn.o.weight": "self_attn.o_proj.weight",
}
_LOW_QUERIES = {
    "attn.q_down.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn.q_up.weight": "self_attn.q_b_proj.weight",
}
_DENSE = {f"ff.{x}.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
_ARCHITECTURES = {
    "LlamaForCausalLM": (False, False, False),
    "Qwen2ForCausalLM": (True, False, False),
    "Qwen3ForCausalLM": (False, True, False),
}
"""As ``MIXTURES``."""
_QKV_BIAS = {f"attn.{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
_QK_NORM = {f"attn.{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}


def entries(spec: DecoderSpec) -> list[Entry]:
    """Their names of our parameters."""
    block = _BLOCK | (_QKV_BIAS if spec.qkv_bias else {}) | (_QK_NORM if spec.qk_norm else {})
    if spec.latent is not None:
        queries = {"attn.q.weight": "self_attn.q_proj.weight"}
        block = _LATENT | (_LOW_QUERIES if spec.latent.q_rank else queries)
    found = [Entry("model.embed_tokens.weight", ("embed.weight",))]
    for layer in range(spec.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        named = block if spec.experts_of(layer) else block | _DENSE
        found += [Entry(f"{theirs}.{name}", (f"{ours}.{own}",)) for own, name in named.items()]
        if spec.experts_of(layer):
            found += expert_entries(spec, layer)
    found.append(Entry("model.norm.weight", ("norm.weight",)))
    if not spec.tied:
        found.append(Entry("lm_head.weight", ("head.weight",)))
    return found


def to_fields(spec: DecoderSpec) -> dict[str, Any]:
    """The ``config.json`` of a shape, in the form that every version of transformers reads."""
    name = _architecture(spec)
    if spec.norms_all_heads and spec.num_heads * spec.d_head != spec.d_model:
        expected = f"d_model / num_heads ({spec.d_model // spec.num_heads}) in {name}"
        raise ConfigError("model.d_head", spec.d_head, expected)
    own = {"intermediate_size": spec.d_ff} if spec.experts is None else expert_fields(name, spec)
    return {
        "architectures": [name],
        "model_type": MODEL_TYPES.get(name, name.removesuffix("ForCausalLM").lower()),
        "hidden_act": "silu",
        "hidden_size": spec.d_model,
        **own,
        **({"head_dim": spec.d_head} if spec.latent is None else _latent_fields(spec, spec.latent)),
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": spec.norm_eps,
        **written_rope(spec),
        "tie_word_embeddings": spec.tied,
    }


def _architecture(spec: DecoderSpec) -> str:
    """Raises ConfigError: there is none for such a shape."""
    if spec.latent is not None:
        if spec.experts is None:
            raise ConfigError("model.experts", None, f"experts, as {DEEPSEEK} has them")
        return DEEPSEEK
    differs = (spec.qkv_bias, spec.qk_norm, spec.norms_all_heads)
    known = _ARCHITECTURES if spec.experts is None else MIXTURES
    if differs not in known.values():
        if not spec.norms_all_heads:
            hint = "No architecture there has both."
            raise ConfigError("model", "qkv_bias and qk_norm", "one of the two", hint)
        expected = "false without experts, as only OlmoeForCausalLM has such norms"
        raise ConfigError("model.norms_all_heads", True, expected)
    return next(name for name, has in known.items() if has == differs)


def _latent_fields(spec: DecoderSpec, low: LatentSpec) -> dict[str, Any]:
    return {
        "q_lora_rank": low.q_rank or None,
        "kv_lora_rank": low.kv_rank,
        "qk_rope_head_dim": low.d_rope,
        "qk_nope_head_dim": spec.d_head - low.d_rope,
        "v_head_dim": low.d_value,
        "rope_interleave": True,
    }


def _read_latent(fields: Fields) -> tuple[int, LatentSpec]:
    """The width of a head's query, and the rest."""
    fields.must("rope_interleave", True)
    d_rope = fields.whole("qk_rope_head_dim", 64)
    d_head = fields.whole("qk_nope_head_dim", 128) + d_rope
    fields.must("qk_head_dim", None, d_head)
    fields.must("head_dim", None, d_rope)
    q_rank = fields.take("q_lora_rank", 0)
    if type(q_rank) is not int or q_rank < 0:
        raise fields.refusal("q_lora_rank", q_rank, "an integer >= 1, or null")
    return d_head, LatentSpec(
        q_rank=q_rank,
        kv_rank=fields.whole("kv_lora_rank", 512),
        d_rope=d_rope,
        d_value=fields.whole("v_head_dim", 128),
    )


def from_fields(architecture: str, fields: Fields) -> DecoderSpec:
    """The shape that a ``config.json`` describes."""
    fields.must("hidden_act", "silu")
    fields.must("attention_bias", False)
    fields.must("mlp_bias", False)
    fields.must("attention_dropout", 0.0)
    fields.must("use_sliding_window", False)
    if architecture == "MixtralForCausalLM":  # there it is used wherever it is given
        fields.must("sliding_window", None)
    fields.take("sliding_window")  # the width of a window that is not used
    kinds = set(fields.words("layer_types"))
    if kinds - {"full_attention"}:
        raise fields.refusal("layer_types", sorted(kinds), "full_attention only")
    heads, d_model = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    qkv_bias, qk_norm, norms_all_heads = (_ARCHITECTURES | MIXTURES)[architecture]
    fields.must("qkv_bias", qkv_bias)
    d_head = 128 if architecture == "Qwen3ForCausalLM" else d_model // heads
    if architecture in MIXTURES:
        d_ff, experts = read_experts(architecture, fields)
    else:
        d_ff, experts = fields.whole("intermediate_size"), None
    latent = None
    if architecture == DEEPSEEK:
        d_head, latent = _read_latent(fields)
    else:
        d_head = fields.whole("head_dim", d_head)
    return DecoderSpec(
        family="llama",
        d_model=d_model,
        d_ff=d_ff,
        d_head=d_head,
        num_layers=fields.whole("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.whole("num_key_value_heads", heads),
        vocab_size=fields.whole("vocab_size"),
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        tied=fields.flag("tie_word_embeddings", default=False),
        **read_rope(fields, latent=latent is not None),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        norms_all_heads=norms_all_heads,
        latent=latent,
        experts=experts,
    )


CONVERTER = Converter(
    architectures=(*_ARCHITECTURES, *MIXTURES),
    prefix="model.",
    from_fields=from_fields,
    to_fields=to_fields,
    entries=entries,
    ignored=("rotary_emb.inv_freq",),
)

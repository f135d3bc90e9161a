"""Llama, Qwen 2, Qwen 3 and mixtures of experts like them as Hugging Face writes them. No torch."""

from __future__ import annotations

from typing import Any

from weft.config.errors import ConfigError
from weft.models.config_json import Converter, Entry, Fields
from weft.models.decoder_spec import DecoderSpec
from weft.models.llama.mixtures import (
    MIXTURES,
    MODEL_TYPES,
    expert_entries,
    expert_fields,
    read_experts,
)
from weft.models.llama.rope import read_rope, written_rope

_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn.q.weight": "self_attn.q_proj.weight",
    "attn.k.weight": "self_attn.k_proj.weight",
    "attn.v.weight": "self_attn.v_proj.weight",
    "attn.o.weight": "self_attn.o_proj.weight",
    "ff_norm.weight": "post_attention_layernorm.weight",
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
    if spec.experts is None:
        block |= _DENSE
    found = [Entry("model.embed_tokens.weight", ("embed.weight",))]
    for layer in range(spec.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        found += [Entry(f"{theirs}.{name}", (f"{ours}.{own}",)) for own, name in block.items()]
        if spec.experts is not None:
            found += expert_entries(spec, layer)
    found.append(Entry("model.norm.weight", ("norm.weight",)))
    if not spec.tied:
        found.append(Entry("lm_head.weight", ("head.weight",)))
    return found


def to_fields(spec: DecoderSpec) -> dict[str, Any]:
    """The ``config.json`` of a shape, in the form that every version of transformers reads."""
    differs = (spec.qkv_bias, spec.qk_norm, spec.norms_all_heads)
    known = _ARCHITECTURES if spec.experts is None else MIXTURES
    if differs not in known.values():
        if not spec.norms_all_heads:
            hint = "No architecture there has both."
            raise ConfigError("model", "qkv_bias and qk_norm", "one of the two", hint)
        expected = "false without experts, as only OlmoeForCausalLM has such norms"
        raise ConfigError("model.norms_all_heads", True, expected)
    name = next(name for name, has in known.items() if has == differs)
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
        "head_dim": spec.d_head,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": spec.norm_eps,
        **written_rope(spec),
        "tie_word_embeddings": spec.tied,
    }


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
    return DecoderSpec(
        family="llama",
        d_model=d_model,
        d_ff=d_ff,
        d_head=fields.whole("head_dim", d_head),
        num_layers=fields.whole("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.whole("num_key_value_heads", heads),
        vocab_size=fields.whole("vocab_size"),
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        tied=fields.flag("tie_word_embeddings", default=False),
        **read_rope(fields),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        norms_all_heads=norms_all_heads,
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

"""Llama, Qwen 2 and Qwen 3 as Hugging Face writes them. No torch."""

from __future__ import annotations

from typing import Any

from weft.config.errors import ConfigError
from weft.models.config_json import Converter, Entry, Fields
from weft.models.decoder_spec import DecoderSpec
from weft.models.llama.rope import read_rope, written_rope

_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn.q.weight": "self_attn.q_proj.weight",
    "attn.k.weight": "self_attn.k_proj.weight",
    "attn.v.weight": "self_attn.v_proj.weight",
    "attn.o.weight": "self_attn.o_proj.weight",
    "ff_norm.weight": "post_attention_layernorm.weight",
    "ff.gate.weight": "mlp.gate_proj.weight",
    "ff.up.weight": "mlp.up_proj.weight",
    "ff.down.weight": "mlp.down_proj.weight",
}
_ARCHITECTURES = {
    "LlamaForCausalLM": (False, False),
    "Qwen2ForCausalLM": (True, False),
    "Qwen3ForCausalLM": (False, True),
}
"""(q, k and v have a bias; q and k have a norm)."""
_QKV_BIAS = {f"attn.{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
_QK_NORM = {f"attn.{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}


def entries(spec: DecoderSpec) -> list[Entry]:
    """Their names of our parameters."""
    block = _BLOCK | (_QKV_BIAS if spec.qkv_bias else {}) | (_QK_NORM if spec.qk_norm else {})
    names = {"embed.weight": "model.embed_tokens.weight"}
    for layer in range(spec.num_layers):
        names |= {f"layers.{layer}.{k}": f"model.layers.{layer}.{v}" for k, v in block.items()}
    names["norm.weight"] = "model.norm.weight"
    if not spec.tied:
        names["head.weight"] = "lm_head.weight"
    return [Entry(theirs, (ours,)) for ours, theirs in names.items()]


def to_fields(spec: DecoderSpec) -> dict[str, Any]:
    """The ``config.json`` of a shape, in the form that every version of transformers reads."""
    differs = (spec.qkv_bias, spec.qk_norm)
    if differs not in _ARCHITECTURES.values():
        hint = "No architecture there has both."
        raise ConfigError("model", "qkv_bias and qk_norm", "one of the two", hint)
    name = next(name for name, has in _ARCHITECTURES.items() if has == differs)
    return {
        "architectures": [name],
        "model_type": name.removesuffix("ForCausalLM").lower(),
        "hidden_act": "silu",
        "hidden_size": spec.d_model,
        "intermediate_size": spec.d_ff,
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
    fields.take("sliding_window")  # the width of a window that is not used
    kinds = set(fields.words("layer_types"))
    if kinds - {"full_attention"}:
        raise fields.refusal("layer_types", sorted(kinds), "full_attention only")
    heads, d_model = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    qkv_bias, qk_norm = _ARCHITECTURES[architecture]
    d_head = 128 if architecture == "Qwen3ForCausalLM" else d_model // heads
    return DecoderSpec(
        family="llama",
        d_model=d_model,
        d_ff=fields.whole("intermediate_size"),
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
    )


CONVERTER = Converter(
    architectures=tuple(_ARCHITECTURES),
    prefix="model.",
    from_fields=from_fields,
    to_fields=to_fields,
    entries=entries,
    ignored=("rotary_emb.inv_freq",),
)

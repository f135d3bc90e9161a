"""GPT-2 as Hugging Face writes it: matrices ``[in, out]``, q, k and v in one. No torch."""

from __future__ import annotations

from typing import Any

from weft.config.errors import ConfigError
from weft.models.config_json import Converter, Entry, Fields
from weft.models.decoder_spec import DecoderSpec

_NORMS = {"attn_norm": "ln_1", "ff_norm": "ln_2"}
_LINEARS = {
    "attn.c_attn": ("attn.q", "attn.k", "attn.v"),
    "attn.c_proj": ("attn.o",),
    "mlp.c_fc": ("ff.up",),
    "mlp.c_proj": ("ff.down",),
}


def entries(spec: DecoderSpec) -> list[Entry]:
    """Their names of our parameters."""
    result = [
        Entry("transformer.wte.weight", ("embed.weight",)),
        Entry("transformer.wpe.weight", ("positions.weight",)),
    ]
    for layer in range(spec.num_layers):
        result += _block_entries(f"layers.{layer}.", f"transformer.h.{layer}.")
    result += [Entry(f"transformer.ln_f.{x}", (f"norm.{x}",)) for x in ("weight", "bias")]
    return result if spec.tied else [*result, Entry("lm_head.weight", ("head.weight",))]


def _block_entries(ours: str, theirs: str) -> list[Entry]:
    result = []
    for end in ("weight", "bias"):
        for name, norm in _NORMS.items():
            result.append(Entry(f"{theirs}{norm}.{end}", (f"{ours}{name}.{end}",)))
        for linear, parts in _LINEARS.items():
            names = tuple(f"{ours}{part}.{end}" for part in parts)
            result.append(Entry(f"{theirs}{linear}.{end}", names, transposed=end == "weight"))
    return result


def to_fields(spec: DecoderSpec) -> dict[str, Any]:
    """The ``config.json`` of a shape."""
    if spec.num_heads * spec.d_head != spec.d_model:
        expected = f"d_model / num_heads ({spec.d_model // spec.num_heads}) in an export"
        raise ConfigError("model.d_head", spec.d_head, expected)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_embd": spec.d_model,
        "n_inner": spec.d_ff,
        "n_layer": spec.num_layers,
        "n_head": spec.num_heads,
        "n_positions": spec.seq_len,
        "vocab_size": spec.vocab_size,
        "layer_norm_epsilon": spec.norm_eps,
        "embd_pdrop": spec.dropout,
        "resid_pdrop": spec.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": spec.tied,
    }


def from_fields(_architecture: str, fields: Fields) -> DecoderSpec:
    """The shape that a ``config.json`` describes."""
    fields.must("activation_function", "gelu_new", "gelu_pytorch_tanh")
    fields.must("scale_attn_weights", True)
    fields.must("scale_attn_by_inverse_layer_idx", False)
    fields.must("add_cross_attention", False)
    d_model, heads = fields.whole("n_embd"), fields.whole("n_head")
    dropout = fields.part("resid_pdrop", 0.1)
    fields.must("embd_pdrop", dropout)
    return DecoderSpec(
        family="gpt2",
        d_model=d_model,
        d_ff=fields.whole("n_inner", 4 * d_model),
        d_head=d_model // heads,
        num_layers=fields.whole("n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        vocab_size=fields.whole("vocab_size"),
        seq_len=fields.whole("n_positions"),
        norm_eps=fields.positive("layer_norm_epsilon", 1e-5),
        tied=fields.flag("tie_word_embeddings", default=True),
        dropout=dropout,
    )


CONVERTER = Converter(
    architectures=("GPT2LMHeadModel",),
    prefix="transformer.",
    from_fields=from_fields,
    to_fields=to_fields,
    entries=entries,
    ignored=(".attn.bias", ".attn.masked_bias"),
)

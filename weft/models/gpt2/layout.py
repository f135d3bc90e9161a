"""The logical dimensions of a GPT-2's tensors, module by module. No torch."""

from __future__ import annotations

from weft.models.decoder_dims import DecoderDims
from weft.models.decoder_spec import DecoderSpec
from weft.plan.layout import Dim, Layout


def layout(spec: DecoderSpec) -> dict[str, Layout]:
    """Module name -> layout, for every module that holds parameters or changes activations."""
    dims = DecoderDims.of(spec)
    rows = Dim(name="positions", size=spec.seq_len)
    table = {"weight": (rows, dims.d_model)}
    result = {
        **dims.ends(tied=spec.tied),
        "positions": Layout(params=table, takes={0: dims.positions}),
        "embed_dropout": Layout(takes={2: dims.positions}),
    }
    block = _block_layout(dims)
    for layer in range(spec.num_layers):
        result |= {f"layers.{layer}.{name}": entry for name, entry in block.items()}
    result["norm"] = Layout(params={"weight": (dims.d_model,), "bias": (dims.d_model,)})
    return result


def _block_layout(dims: DecoderDims) -> dict[str, Layout]:
    """A bias that is added after a sum has the sum's dimension: it is added once."""
    d_model, d_ff, heads, kv_heads = dims.d_model, dims.d_ff, dims.heads, dims.kv_heads
    norm = Layout(params={"weight": (d_model,), "bias": (d_model,)})
    keys = Layout(params={"weight": (kv_heads, d_model), "bias": (kv_heads,)})
    dropout = Layout(takes={2: dims.positions})
    return {
        "attn_norm": norm,
        "attn": Layout(takes={0: dims.enters}, mixes=dims.seq),  # once for q, k and v
        "attn.q": Layout(params={"weight": (heads, d_model), "bias": (heads,)}),
        "attn.k": keys,
        "attn.v": keys,
        "attn.o": Layout(
            params={"weight": (d_model, heads), "bias": (d_model,)}, sums=heads, gives=dims.leaves
        ),
        "attn_dropout": dropout,
        "ff_norm": norm,
        "ff": Layout(takes={0: dims.enters}),
        "ff.up": Layout(params={"weight": (d_ff, d_model), "bias": (d_ff,)}),
        "ff.down": Layout(
            params={"weight": (d_model, d_ff), "bias": (d_model,)}, sums=d_ff, gives=dims.leaves
        ),
        "ff_dropout": dropout,
    }

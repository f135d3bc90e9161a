"""The logical dimensions of a Llama's tensors, module by module. No torch."""

from __future__ import annotations

from weft.models.decoder_family import DecoderDims
from weft.models.decoder_spec import DecoderSpec
from weft.plan.layout import Dim, Layout


def layout(spec: DecoderSpec) -> dict[str, Layout]:
    """Module name -> layout, for every module."""
    dims = DecoderDims.of(spec)
    d_model, d_ff, heads, kv_heads = dims.d_model, dims.d_ff, dims.heads, dims.kv_heads
    queries: dict[str, tuple[Dim, ...]] = {"weight": (heads, d_model)}
    keys: dict[str, tuple[Dim, ...]] = {"weight": (kv_heads, d_model)}
    if spec.qkv_bias:
        queries["bias"], keys["bias"] = (heads,), (kv_heads,)

    def row(inputs: Dim) -> Layout:
        params = {"weight": (d_model, inputs)}
        return Layout(kind="Linear", params=params, sums=inputs, gives=dims.leaves)

    norm, head_norm = (Layout(params={"weight": (dim,)}) for dim in (d_model, dims.d_head))
    block = {
        "attn_norm": norm,
        "attn": Layout(
            kind="Attention", takes={0: dims.enters}, mixes=dims.seq, read_by=("q", "k", "v")
        ),
        "attn.q": Layout(params=queries),
        "attn.k": Layout(params=keys),
        "attn.v": Layout(params=keys),
        "attn.o": row(heads),
        **({"attn.q_norm": head_norm, "attn.k_norm": head_norm} if spec.qk_norm else {}),
        "ff_norm": norm,
        "ff": Layout(takes={0: dims.enters}, made_by="down"),
        "ff.gate": Layout(params={"weight": (d_ff, d_model)}),
        "ff.up": Layout(params={"weight": (d_ff, d_model)}),
        "ff.down": row(d_ff),
    }
    return dims.whole(spec, block, norm, rotary=Layout(takes={0: dims.tokens}))

"""The logical dimensions of a GPT-2's tensors, module by module. No torch."""

from __future__ import annotations

from weft.models.decoder_family import DecoderDims
from weft.models.decoder_spec import DecoderSpec
from weft.plan.layout import Dim, Layout


def layout(spec: DecoderSpec) -> dict[str, Layout]:
    """Module name -> layout, for every module.

    A bias that is added after a sum has the sum's dimension: it is added once.
    """
    dims = DecoderDims.of(spec)
    d_model, d_ff, heads, kv_heads = dims.d_model, dims.d_ff, dims.heads, dims.kv_heads

    def linear(outputs: Dim, inputs: Dim) -> Layout:
        params = {"weight": (outputs, inputs), "bias": (outputs,)}
        if outputs is not d_model:
            return Layout(params=params)
        return Layout(kind="Linear", params=params, sums=inputs, gives=dims.leaves)

    norm = Layout(params={"weight": (d_model,), "bias": (d_model,)})
    dropout = Layout(takes={2: dims.positions})
    block = {
        "attn_norm": norm,
        "attn": Layout(
            kind="Attention", takes={0: dims.enters}, mixes=dims.seq, read_by=("q", "k", "v")
        ),
        "attn.q": linear(heads, d_model),
        "attn.k": linear(kv_heads, d_model),
        "attn.v": linear(kv_heads, d_model),
        "attn.o": linear(d_model, heads),
        "attn_dropout": dropout,
        "ff_norm": norm,
        "ff": Layout(takes={0: dims.enters}, made_by="down"),
        "ff.up": linear(d_ff, d_model),
        "ff.down": linear(d_model, d_ff),
        "ff_dropout": dropout,
    }
    rows = {"weight": (Dim(name="positions", size=spec.seq_len), d_model)}
    positions = Layout(params=rows, takes={0: dims.positions})
    return dims.whole(spec, lambda _: block, norm, positions=positions, embed_dropout=dropout)

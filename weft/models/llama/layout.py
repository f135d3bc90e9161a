"""The logical dimensions of a Llama's tensors, module by module. No torch."""

from __future__ import annotations

from dataclasses import replace

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

    def head_norm(channels: Dim) -> Layout:
        if not spec.norms_all_heads:
            return Layout(params={"weight": (dims.d_head,)})
        return Layout(kind="RMSNorm", params={"weight": (channels,)}, sums=channels)

    norms = {"attn.q_norm": head_norm(heads), "attn.k_norm": head_norm(kv_heads)}
    norm = Layout(params={"weight": (d_model,)})
    block = {
        "attn_norm": norm,
        "attn": Layout(
            kind="Attention", takes={0: dims.enters}, mixes=dims.seq, read_by=("q", "k", "v")
        ),
        "attn.q": Layout(params=queries),
        "attn.k": Layout(params=keys),
        "attn.v": Layout(params=keys),
        "attn.o": row(heads),
        **(norms if spec.qk_norm else {}),
        "ff_norm": norm,
        **(_experts(spec, dims) if spec.experts else _dense(dims, row(d_ff))),
    }
    return dims.whole(spec, block, norm, rotary=Layout(takes={0: dims.tokens}))


def _dense(dims: DecoderDims, down: Layout) -> dict[str, Layout]:
    wide = Layout(params={"weight": (dims.d_ff, dims.d_model)})
    return {
        "ff": Layout(takes={0: dims.enters}, made_by="down"),
        "ff.gate": wide,
        "ff.up": wide,
        "ff.down": down,
    }


def _experts(spec: DecoderSpec, dims: DecoderDims) -> dict[str, Layout]:
    """A part of each expert's hidden channels makes a term of the result, and tokens of all samples
    go to an expert. The gate looks at one token after the other, and has scores of every expert;
    but loads are of a whole sequence."""
    assert spec.experts is not None, "a layer without experts"
    d_model, d_ff = dims.d_model, dims.d_ff
    count = Dim(name="experts", size=spec.experts.count)
    scores = replace(count, name="scores")
    has_bias = spec.experts.bias_step is not None
    wide = Layout(params={"weight": (count, d_ff, d_model)})
    found = {
        "ff": Layout(
            kind="Experts", takes={0: dims.enters}, sums=d_ff, mixes=count, gives=dims.leaves
        ),
        "ff.router": Layout(
            kind="Gate",
            params={"weight": (scores, d_model), **({"bias": (scores,)} if has_bias else {})},
            settled=("bias",) if has_bias else (),
            mixes=dims.seq if spec.experts.balance else None,
        ),
        "ff.gate": wide,
        "ff.up": wide,
        "ff.down": Layout(params={"weight": (count, d_model, d_ff)}),
    }
    if not spec.experts.shared_d_ff:
        return found
    shared = Dim(name="shared_d_ff", size=spec.experts.shared_d_ff, width=True)
    one = Layout(params={"weight": (shared, d_model)})
    found |= {
        "ff.shared": Layout(),
        "ff.shared.ff": Layout(),
        "ff.shared.ff.gate": one,
        "ff.shared.ff.up": one,
        "ff.shared.ff.down": Layout(params={"weight": (d_model, shared)}),
    }
    if spec.experts.shared_gate:
        gate = {"weight": (Dim(name="one", size=1), d_model)}
        found["ff.shared.gate"] = Layout(params=gate)
    return found

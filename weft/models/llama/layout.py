"""The logical dimensions of a Llama's tensors, module by module. No torch."""

from __future__ import annotations

from dataclasses import replace

from weft.models.decoder_family import DecoderDims
from weft.models.decoder_spec import DecoderSpec
from weft.plan.layout import Dim, Layout
from weft.plan.model import ExpertsSpec


def layout(spec: DecoderSpec) -> dict[str, Layout]:
    """Module name -> layout, for every module."""
    dims = DecoderDims.of(spec)
    norm = Layout(params={"weight": (dims.d_model,)})
    attention = _attention(spec, dims) if spec.latent is None else _latent_attention(spec, dims)

    def block(layer: int) -> dict[str, Layout]:
        experts = spec.experts_of(layer)
        feeds = _dense(dims) if experts is None else _experts(experts, dims)
        return {"attn_norm": norm, **attention, "ff_norm": norm, **feeds}

    return dims.whole(spec, block, norm, rotary=Layout(takes={0: dims.tokens}))


def _row(dims: DecoderDims, inputs: Dim) -> Layout:
    """A product that ends a branch."""
    params = {"weight": (dims.d_model, inputs)}
    return Layout(kind="Linear", params=params, sums=inputs, gives=dims.leaves)


def _attention(spec: DecoderSpec, dims: DecoderDims) -> dict[str, Layout]:
    heads, kv_heads = dims.heads, dims.kv_heads
    queries: dict[str, tuple[Dim, ...]] = {"weight": (heads, dims.d_model)}
    keys: dict[str, tuple[Dim, ...]] = {"weight": (kv_heads, dims.d_model)}
    if spec.qkv_bias:
        queries["bias"], keys["bias"] = (heads,), (kv_heads,)

    def head_norm(channels: Dim) -> Layout:
        if not spec.norms_all_heads:
            return Layout(params={"weight": (dims.d_head,)})
        return Layout(kind="RMSNorm", params={"weight": (channels,)}, sums=channels)

    norms = {"attn.q_norm": head_norm(heads), "attn.k_norm": head_norm(kv_heads)}
    return {
        "attn": Layout(
            kind="Attention", takes={0: dims.enters}, mixes=dims.seq, read_by=("q", "k", "v")
        ),
        "attn.q": Layout(params=queries),
        "attn.k": Layout(params=keys),
        "attn.v": Layout(params=keys),
        "attn.o": _row(dims, heads),
        **(norms if spec.qk_norm else {}),
    }


def _latent_attention(spec: DecoderSpec, dims: DecoderDims) -> dict[str, Layout]:
    """What is of low rank is whole everywhere, and what is made of it is of heads."""
    low = spec.latent
    assert low is not None, "attention through low ranks"

    def of_heads(name: str, width: int) -> Dim:
        words, many = f"{spec.num_heads} heads", spec.num_heads
        return Dim(name=name, size=many * width, groups=many, width=True, words=words)

    queries, values = of_heads("heads", spec.d_head), of_heads("values", low.d_value)
    both = of_heads("keys and values", spec.d_head - low.d_rope + low.d_value)
    q_rank, kv_rank = Dim(name="q_rank", size=low.q_rank), Dim(name="kv_rank", size=low.kv_rank)
    down = Dim(name="kv_down", size=low.kv_rank + low.d_rope)
    by_rank = {
        "attn.q_down": Layout(params={"weight": (q_rank, dims.d_model)}),
        "attn.q_norm": Layout(params={"weight": (q_rank,)}),
        "attn.q_up": Layout(params={"weight": (queries, q_rank)}),
    }
    plain = {"attn.q": Layout(params={"weight": (queries, dims.d_model)})}
    first = ("q_down", "kv_down") if low.q_rank else ("q", "kv_down")
    return {
        "attn": Layout(
            kind="LatentAttention", takes={0: dims.enters}, mixes=dims.seq, read_by=first
        ),
        **(by_rank if low.q_rank else plain),
        "attn.kv_down": Layout(params={"weight": (down, dims.d_model)}),
        "attn.kv_norm": Layout(params={"weight": (kv_rank,)}),
        "attn.kv_up": Layout(params={"weight": (both, kv_rank)}),
        "attn.o": _row(dims, values),
    }


def _dense(dims: DecoderDims) -> dict[str, Layout]:
    wide = Layout(params={"weight": (dims.d_ff, dims.d_model)})
    return {
        "ff": Layout(takes={0: dims.enters}, made_by="down"),
        "ff.gate": wide,
        "ff.up": wide,
        "ff.down": _row(dims, dims.d_ff),
    }


_OF_SAMPLES = (
    "What an expert has room for is of whole samples: it can where model.experts has "
    "capacity: null and choice: tokens."
)


def _experts(experts: ExpertsSpec, dims: DecoderDims) -> dict[str, Layout]:
    """A part of each expert's hidden channels makes a term of the result, and tokens of all samples
    go to an expert. The gate looks at one token after the other, and has scores of every expert;
    but limits are of a whole sequence."""
    d_model, d_ff = dims.d_model, dims.d_ff
    if experts.d_ff:
        d_ff = replace(d_ff, size=experts.d_ff)
    count = Dim(name="experts", size=experts.count)
    scores = replace(count, name="scores")
    has_bias = experts.bias_step is not None
    has_room = experts.room(dims.seq.size) is not None
    looks_along = replace(dims.seq, words=_OF_SAMPLES) if has_room else None
    terms = ("balance", "Balance", experts.balance), ("large_logits", "LargeLogits", experts.z)
    wide = Layout(params={"weight": (count, d_ff, d_model)})
    found = {
        "ff": Layout(
            kind="Experts", takes={0: dims.enters}, sums=d_ff, mixes=count, gives=dims.leaves
        ),
        "ff.router": Layout(
            kind="Gate",
            params={"weight": (scores, d_model), **({"bias": (scores,)} if has_bias else {})},
            settled=("bias",) if has_bias else (),
            mixes=looks_along,
        ),
        **{
            f"ff.{name}": Layout(kind=kind, mixes=dims.seq)
            for name, kind, factor in terms
            if factor
        },
        "ff.gate": wide,
        "ff.up": wide,
        "ff.down": Layout(params={"weight": (count, d_model, d_ff)}),
    }
    if not experts.shared_d_ff:
        return found
    shared = Dim(name="shared_d_ff", size=experts.shared_d_ff, width=True)
    one = Layout(params={"weight": (shared, d_model)})
    found |= {
        "ff.shared": Layout(),
        "ff.shared.ff": Layout(),
        "ff.shared.ff.gate": one,
        "ff.shared.ff.up": one,
        "ff.shared.ff.down": Layout(params={"weight": (d_model, shared)}),
    }
    if experts.shared_gate:
        gate = {"weight": (Dim(name="one", size=1), d_model)}
        found["ff.shared.gate"] = Layout(params=gate)
    return found

"""What the dimensions of its tensors are; which axis divides them follows."""

from __future__ import annotations

from dataclasses import replace

from task_experts.sizes import VisionSpec
from weft.plan.layout import SAMPLES, Dim, Edge, Layout


def layout(spec: VisionSpec) -> dict[str, Layout]:
    """Module name -> layout, for every module."""
    d_model, seq = Dim(name="d_model", size=spec.d_model), Dim(name="seq", size=spec.seq_len)
    pixels, rows = Dim(name="pixels", size=spec.vocab_size), replace(seq, name="positions")
    classes = Dim(name="classes", size=spec.num_classes, width=True)
    hidden = (SAMPLES, seq, d_model)
    enters = Edge(hidden, "stream", "inner")
    places = Edge((SAMPLES, seq), "batch", "stream")
    patches = Edge((SAMPLES, seq, pixels), "batch", "stream")
    norm = Layout(params={"weight": (d_model,)})
    result = {
        "": Layout(),
        "embed": Layout(params={"weight": (d_model, pixels)}, takes={0: patches}),
        "positions": Layout(params={"weight": (rows, d_model)}, takes={0: places}),
    }
    for layer in range(spec.num_layers):
        result[f"layers.{layer}"] = Layout()
        blocks = {"attn_norm": norm, **_attention(spec, enters), "ff_norm": norm}
        for name, entry in {**blocks, **_experts(spec, enters)}.items():
            result[f"layers.{layer}.{name}"] = entry
    result["norm"] = norm
    result["head"] = Layout(params={"weight": (classes, d_model)})
    result["cross_entropy"] = Layout(
        kind="LinearCrossEntropy", takes={0: enters}, sums=classes, mixes=seq
    )
    return result


def _leaves(enters: Edge) -> Edge:
    return Edge(enters.dims, "inner", "stream")


def _attention(spec: VisionSpec, enters: Edge) -> dict[str, Layout]:
    _, seq, d_model = enters.dims
    heads = Dim(name="heads", size=spec.d_model, groups=spec.num_heads, width=True)
    column = Layout(params={"weight": (heads, d_model)})
    row = {"weight": (d_model, heads)}
    return {
        "attn": Layout(kind="Attention", takes={0: enters}, mixes=seq),
        "attn.q": column,
        "attn.k": column,
        "attn.v": column,
        "attn.o": Layout(kind="Linear", params=row, sums=heads, gives=_leaves(enters)),
    }


def _experts(spec: VisionSpec, enters: Edge) -> dict[str, Layout]:
    """The gate has scores of each expert for each task, and looks at no token."""
    _, _, d_model = enters.dims
    d_ff = Dim(name="d_ff", size=spec.d_ff, width=True)
    count = Dim(name="experts", size=spec.experts.count)
    tasks = Dim(name="tasks", size=spec.experts.tasks)
    shared = Dim(name="shared_d_ff", size=spec.experts.shared_d_ff, width=True)
    wide, one = (
        Layout(params={"weight": dims}) for dims in ((count, d_ff, d_model), (shared, d_model))
    )
    return {
        "ff": Layout(
            kind="Experts", takes={0: enters}, sums=d_ff, mixes=count, gives=_leaves(enters)
        ),
        "ff.router": Layout(kind="Gate", params={"weight": (replace(count, name="scores"), tasks)}),
        "ff.large_logits": Layout(kind="LargeLogits", mixes=enters.dims[1]),
        "ff.gate": wide,
        "ff.up": wide,
        "ff.down": Layout(params={"weight": (count, d_model, d_ff)}),
        "ff.shared": Layout(),
        "ff.shared.ff": Layout(),
        "ff.shared.ff.gate": one,
        "ff.shared.ff.up": one,
        "ff.shared.ff.down": Layout(params={"weight": (d_model, shared)}),
        "ff.shared.gate": Layout(params={"weight": (Dim(name="one", size=1), d_model)}),
    }

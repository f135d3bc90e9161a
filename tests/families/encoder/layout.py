"""What the dimensions of its tensors are, in words of its own where others have none."""

from families.encoder.sizes import EncoderSpec

from weft.plan.layout import SAMPLES, Dim, Edge, Layout


def layout(spec: EncoderSpec) -> dict[str, Layout]:
    d_model, seq = Dim(name="d_model", size=spec.d_model), Dim(name="seq", size=spec.seq_len)
    heads = Dim(name="heads", size=spec.num_heads * spec.d_head, groups=spec.num_heads, width=True)
    d_ff = Dim(name="d_ff", size=spec.d_ff, width=True)
    vocab = Dim(name="vocab", size=spec.vocab_size, width=True)
    classes = Dim(name="classes", size=spec.num_classes, width=True)
    hidden = (SAMPLES, seq, d_model)
    enters, leaves = Edge(hidden, "stream", "inner"), Edge(hidden, "inner", "stream")
    tokens, places = (Edge((SAMPLES, seq), "batch", form) for form in ("inner", "stream"))
    rows = Dim(name="positions", size=spec.seq_len)
    norm = Layout(params={"weight": (d_model,), "bias": (d_model,)})
    result = {
        "": Layout(),
        "embed": Layout(
            kind="Embedding",
            params={"weight": (vocab, d_model)},
            sums=vocab,
            takes={0: tokens},
            gives=leaves,
        ),
        "positions": Layout(params={"weight": (rows, d_model)}, takes={0: places}),
        "norm": norm,
        "head": Layout(params={"weight": (classes, d_model)}),
        "cross_entropy": Layout(
            kind="LinearCrossEntropy", takes={0: enters}, sums=classes, mixes=seq
        ),
    }

    def row(inputs: Dim) -> Layout:
        params = {"weight": (d_model, inputs)}
        return Layout(kind="Linear", params=params, sums=inputs, gives=leaves)

    column = Layout(params={"weight": (heads, d_model)})
    block = {
        "attn_norm": norm,
        "attn": Layout(kind="Masked" if spec.hides else "Attention", takes={0: enters}, mixes=seq),
        "attn.q": column,
        "attn.k": column,
        "attn.v": column,
        "attn.o": row(heads),
        "ff_norm": norm,
        "ff": Layout(takes={0: enters}),
        "ff.up": Layout(params={"weight": (d_ff, d_model)}),
        "ff.down": row(d_ff),
    }
    for layer in range(spec.num_layers):
        result[f"layers.{layer}"] = Layout()
        result |= {f"layers.{layer}.{name}": entry for name, entry in block.items()}
    return result

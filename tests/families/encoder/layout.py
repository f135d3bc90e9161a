"""What the dimensions of its tensors are. Its classes are divided as a vocabulary is."""

from families.encoder.sizes import EncoderSpec

from weft.plan.layout import SAMPLES, Dim, Edge, Layout


def layout(spec: EncoderSpec) -> dict[str, Layout]:
    d_model, seq = Dim(name="d_model", size=spec.d_model), Dim(name="seq", size=spec.seq_len)
    heads = Dim(name="heads", size=spec.num_heads * spec.d_head, groups=spec.num_heads)
    d_ff = Dim(name="d_ff", size=spec.d_ff)
    vocab, classes = (Dim(name="vocab", size=n) for n in (spec.vocab_size, spec.num_classes))
    hidden = (SAMPLES, seq, d_model)
    enters, leaves = Edge(hidden, "stream", "inner"), Edge(hidden, "inner", "stream")
    places = Edge((SAMPLES, seq), "inner", "stream")
    rows = Dim(name="positions", size=spec.seq_len)
    norm = Layout(params={"weight": (d_model,), "bias": (d_model,)})
    result = {
        "embed": Layout(params={"weight": (vocab, d_model)}, sums=vocab, gives=leaves),
        "positions": Layout(params={"weight": (rows, d_model)}, takes={0: places}),
        "norm": norm,
        "head": Layout(params={"weight": (classes, d_model)}),
        "cross_entropy": Layout(takes={0: enters}, sums=classes),
    }
    column = Layout(params={"weight": (heads, d_model)})
    block = {
        "attn_norm": norm,
        "attn": Layout(takes={0: enters}),
        "attn.q": column,
        "attn.k": column,
        "attn.v": column,
        "attn.o": Layout(params={"weight": (d_model, heads)}, sums=heads, gives=leaves),
        "ff_norm": norm,
        "ff": Layout(takes={0: enters}),
        "ff.up": Layout(params={"weight": (d_ff, d_model)}),
        "ff.down": Layout(params={"weight": (d_model, d_ff)}, sums=d_ff, gives=leaves),
    }
    for layer in range(spec.num_layers):
        result |= {f"layers.{layer}.{name}": entry for name, entry in block.items()}
    return result

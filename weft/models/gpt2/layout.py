"""Tensor- and sequence-parallel layout of GPT-2 (arXiv 1909.08053, 2205.05198). No torch.

Between modules activations are sharded on ``seq``; each sub-block gathers them once, splits its
heads or hidden channels, and scatters its sum back. A bias that is added after the sum is whole
on every holder and added once, to the holder's own part of the sequence.
"""

from __future__ import annotations

from weft.models.decoder_spec import DecoderSpec
from weft.plan.layout import Layout, Replicate, Shard


def layout(spec: DecoderSpec) -> dict[str, Layout]:
    """Module name -> layout, for every module that holds parameters or changes activations."""
    seq, whole = Shard(1), Replicate()
    result = {
        "embed": Layout(params={"weight": Shard(0)}, takes=whole, gives=seq),
        "positions": Layout(params={"weight": whole}, takes=seq),
    }
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}."
        result |= {prefix + name: entry for name, entry in _block_layout().items()}
    result["norm"] = Layout(params={"weight": whole, "bias": whole})
    if not spec.tied:
        result["head"] = Layout(params={"weight": Shard(0)}, takes=whole)
    return result


def _block_layout() -> dict[str, Layout]:
    seq, whole = Shard(1), Replicate()
    norm = Layout(params={"weight": whole, "bias": whole})
    queries = Layout(params=dict.fromkeys(("weight", "bias"), Shard(0, "head")))
    keys = Layout(params=dict.fromkeys(("weight", "bias"), Shard(0, "kv_head")))
    column = Layout(params={"weight": Shard(0), "bias": Shard(0)})
    row = Layout(params={"weight": Shard(1), "bias": whole}, gives=seq)
    return {
        "attn_norm": norm,
        "attn": Layout(takes=whole),  # one gather for q, k and v
        "attn.q": queries,
        "attn.k": keys,
        "attn.v": keys,
        "attn.o": Layout(params={"weight": Shard(1, "head"), "bias": whole}, gives=seq),
        "ff_norm": norm,
        "ff": Layout(takes=whole),
        "ff.up": column,
        "ff.down": row,
    }

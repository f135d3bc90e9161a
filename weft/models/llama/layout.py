"""Tensor- and sequence-parallel layout of Llama (arXiv 1909.08053, 2205.05198). No torch.

Between modules activations are sharded on ``seq``; each sub-block gathers them once, splits its
heads or hidden channels, and scatters its sum back.
"""

from __future__ import annotations

from weft.models.decoder_spec import DecoderSpec
from weft.plan.layout import Layout, Replicate, Shard


def layout(spec: DecoderSpec) -> dict[str, Layout]:
    """Module name -> layout, for every module that holds parameters or changes activations."""
    seq, whole = Shard(1), Replicate()
    result = {"embed": Layout(params={"weight": Shard(0)}, takes=whole, gives=seq)}
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}."
        result |= {prefix + name: entry for name, entry in _block_layout(spec).items()}
    result["norm"] = Layout(params={"weight": whole})
    if not spec.tied:
        result["head"] = Layout(params={"weight": Shard(0)}, takes=whole)
    return result


def _block_layout(spec: DecoderSpec) -> dict[str, Layout]:
    seq, whole = Shard(1), Replicate()
    names = ("weight", "bias") if spec.qkv_bias else ("weight",)
    queries = dict.fromkeys(names, Shard(0, "head"))
    keys = dict.fromkeys(names, Shard(0, "kv_head"))
    norm = Layout(params={"weight": whole})
    result = {
        "attn_norm": norm,
        "attn": Layout(takes=whole),  # one gather for q, k and v
        "attn.q": Layout(params=queries),
        "attn.k": Layout(params=keys),
        "attn.v": Layout(params=keys),
        "attn.o": Layout(params={"weight": Shard(1, "head")}, gives=seq),
        "ff_norm": norm,
        "ff": Layout(takes=whole),  # one gather for gate and up
        "ff.gate": Layout(params={"weight": Shard(0)}),
        "ff.up": Layout(params={"weight": Shard(0)}),
        "ff.down": Layout(params={"weight": Shard(1)}, gives=seq),
    }
    if spec.qk_norm:
        result |= {"attn.q_norm": norm, "attn.k_norm": norm}
    return result

"""Bytes that a microbatch keeps from its forward to its backward, and what a layer needs meanwhile.

The count follows what backward reads: the inputs of matrix products, of norms and of activations,
and a byte for every dropout mask. With scores in memory and full dropout it is the published
``s b h (34 + 5 a s / h)`` (arXiv 2205.05198). The linear term remains where attention is fused and
the sequence is long: 256 Ki tokens of 1024 channels keep 10 GiB a layer.
"""

from __future__ import annotations

from functools import lru_cache

from weft.cost.work import StageWork, layers_by_kind
from weft.models.shape import ModelShape

BLOCK_QUERIES = 64
"""Of attention on a processor, as in ``weft/nn/causal_attention.py``; likewise the next one."""
KEPT_SEQ = 512
"""Up to this length it keeps the probabilities."""
CHUNK_LOGITS = 1 << 20
"""That live at once on a processor, as in ``weft/nn/losses.py``; likewise the next one."""
CHUNK_TOKENS = 256


@lru_cache(maxsize=1 << 14)
def layer_kept(shape: ModelShape, work: StageWork, *, experts: bool) -> float:
    """Bytes that one layer keeps of one microbatch on one rank."""
    least = work.wide * work.rows * shape.d_model
    if work.recompute == "full":
        return least
    whole = _whole_layer(shape, work, experts=experts, scores=work.recompute != "selective")
    return (whole + least) / 2 if work.recompute == "half" else whole


def layer_working(shape: ModelShape, work: StageWork, *, experts: bool) -> float:
    """Bytes that live while one layer computes: what recomputation brings back, and gradients."""
    again = _whole_layer(shape, work, experts=experts, scores=True)
    kept = layer_kept(shape, work, experts=experts)
    many = 3 if work.eager else 1
    gradients = work.wide * work.tokens * (shape.d_model + many * shape.d_ff / work.share("d_ff"))
    return again - min(kept, again) + gradients


def _whole_layer(shape: ModelShape, work: StageWork, *, experts: bool, scores: bool) -> float:
    tokens, rows, wide = work.tokens, work.rows, work.wide * work.tokens
    # Inputs, outputs; two masks. Gathered outputs are kept, where they are not gathered again.
    outputs = tokens if work.eager else rows
    each = work.wide * (rows + outputs) + shape.dropout * rows
    norms = shape.branches * shape.d_model * each
    heads = shape.num_heads / work.share("heads")
    least = 1.0 if shape.latent is None else 0.0
    kv_heads = max(shape.num_kv_heads / work.share("kv_heads"), least)
    query_and_result = heads * (shape.key_width + shape.value_width)
    keys_and_values = kv_heads * (shape.key_width + shape.value_width)
    total = norms + wide * (query_and_result + keys_and_values)
    if shape.latent is not None:
        total += wide * (shape.latent.q_rank + shape.latent.kv_rank + shape.latent.d_rope)
    if work.eager:
        seen = (work.seq_len + BLOCK_QUERIES) / 2
        total += wide * heads * seen * (work.seq_len <= KEPT_SEQ)
    elif work.fused_attention:
        total += 4 * tokens * heads
    elif scores:
        total += tokens * work.seq_len * heads * (2 + 3 * shape.dropout)
    return total + _feed_forward(shape, work, experts=experts)


def _feed_forward(shape: ModelShape, work: StageWork, *, experts: bool) -> float:
    wide = work.wide * work.tokens
    if not experts or shape.experts is None:
        many = shape.num_matrices + (work.eager and shape.gated)
        return wide * many * shape.d_ff / work.share("d_ff")
    mixture = shape.experts
    split = work.share("d_ff")
    visited = mixture.top_k * (shape.num_matrices * mixture.d_ff / split + 2 * shape.d_model)
    shared = shape.num_matrices * mixture.shared_d_ff / split
    return wide * (visited + shared)


@lru_cache(maxsize=1 << 14)
def stage_kept(shape: ModelShape, work: StageWork) -> float:
    """Bytes that a whole stage keeps of one microbatch on one rank, logits apart."""
    kinds = layers_by_kind(shape, work.layers)
    layers = sum(number * layer_kept(shape, work, experts=experts) for experts, number in kinds)
    rows = work.rows
    embedding = (8 * work.tokens + shape.dropout * rows * shape.d_model) * work.embeds
    norm = 2 * work.wide * rows * shape.d_model * work.predicts
    return layers + embedding + norm


def stage_working(shape: ModelShape, work: StageWork) -> float:
    """The most that lives while one layer, or the head, computes."""
    kinds = layers_by_kind(shape, work.layers)
    layers = [layer_working(shape, work, experts=experts) for experts, _ in kinds]
    return max([*layers, logits(shape, work)], default=0.0)


def logits(shape: ModelShape, work: StageWork) -> float:
    """Logits in two bytes, in four for the loss, and their gradient in four; head only.

    In chunks: two of a chunk's logits, and what is kept from the forward: the gradients of the
    hidden states and, three times while it is handed on, of the head's weight.
    """
    if not work.predicts:
        return 0.0
    width = shape.vocab_size / work.share("vocab")
    if not work.eager:
        return 10 * work.tokens * width
    if (
        work.share("vocab") > 1
    ):  # a head split along the vocabulary keeps its probabilities for backward
        return work.tokens * (4 * width + work.wide * shape.d_model) + 4 * 4 * CHUNK_TOKENS * width
    rows = min(work.tokens, max(CHUNK_TOKENS, CHUNK_LOGITS / width))
    grads = work.wide * work.tokens * shape.d_model + 3 * 4 * width * shape.d_model
    return 2 * 4 * rows * width + grads

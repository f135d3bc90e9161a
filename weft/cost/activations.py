"""Bytes that a microbatch keeps from its forward to its backward, and what a layer needs meanwhile.

The count follows what backward reads: the inputs of matrix products, of norms and of activations,
and a byte for every dropout mask. With scores in memory and full dropout it is the published
``s b h (34 + 5 a s / h)`` (arXiv 2205.05198). The linear term remains where attention is fused and
the sequence is long: 256 Ki tokens of 1024 channels keep 10 GiB a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from weft.cost.work import StageWork, layers_alike
from weft.models.shape import Branch, ModelShape
from weft.recompute.asked import ELSEWHERE
from weft.recompute.mode import Item
from weft.recompute.registry import MODES

BLOCK_QUERIES = 64
"""Of attention on a processor, as in ``weft/nn/causal_attention.py``; likewise the next one."""
KEPT_SEQ = 512
"""Up to this length it keeps the probabilities."""
CHUNK_LOGITS = 1 << 20
"""That live at once on a processor, as in ``weft/nn/losses.py``; likewise the next three."""
CHUNK_ELSEWHERE = 1 << 28
CHUNK_COMPILED = 1 << 29
CHUNK_TOKENS = 256
PART_TOKENS = 1024
"""Of a part of the head, or one divided along the vocabulary, whose logits are wide at once, as in
``weft/nn/rows_loss.py`` and ``weft/parallel/split_vocab.py``."""
_SECOND: tuple[Item, ...] = ("ff input", "ff masks", "ff read", "gates", "hidden")
"""What the second part of a layer keeps; what enters it is its input where it is alone."""


@lru_cache(maxsize=1 << 14)
def layer_kept(
    shape: ModelShape, work: StageWork, *, experts: bool, branch: Branch | None = None
) -> float:
    """Bytes that one layer, or part of one, keeps of one microbatch on one rank."""
    items = layer_items(shape, work, experts=experts, branch=branch)
    whole = sum(items.values())
    if not work.recompute:
        return whole
    others = 1 - sum(part for _, part in work.recompute)
    return others * whole + sum(part * _kept(items, names) for names, part in work.recompute)


def layer_working(
    shape: ModelShape, work: StageWork, *, experts: bool, branch: Branch | None = None
) -> float:
    """Bytes that live while one layer computes: what recomputation brings back, and gradients."""
    items = layer_items(shape, work, experts=experts, branch=branch)
    slabs = [names for names, _ in work.recompute]
    if sum(part for _, part in work.recompute) < 1 or not slabs:
        slabs.append(())
    if work.eager:
        return max(_on_processor(shape, work, items, names, branch) for names in slabs)
    again = max(_made_again(items, names, work) for names in slabs)
    again += max(_away(items, names) for names in slabs)  # a neighbour's
    width = shape.d_ff / work.share("d_ff")
    if branch == "attention":
        width = work.heads(shape) * shape.value_width
    else:  # of a chunk, where all layers have chunks
        width *= max(_at_once(names, work) for names in slabs)
    return again + work.wide * work.tokens * (shape.d_model + width)


def _on_processor(
    shape: ModelShape,
    work: StageWork,
    items: Mapping[Item, float],
    names: Sequence[str],
    branch: Branch | None,
) -> float:
    """The more of the two parts of a layer's backward, beside all that the layer keeps: when
    attention's begins, what the feed-forward kept is gone."""
    most = []
    if branch != "attention":
        again = [name for name in names if MODES[name].branch != "attention"]
        width = shape.d_ff / work.share("d_ff") * _at_once(names, work)
        grads = 2 if shape.gated else 1  # of three, or two: what they are made of is gone
        wide = work.wide * work.tokens * (shape.d_model + grads * width)
        most.append(_made_again(items, again, work) + wide)
    if branch != "feed_forward" and shape.num_heads:
        again = [name for name in names if MODES[name].branch != "feed_forward"]
        read = _attention_grads(shape, work, copied="core" in names)
        most.append(_made_again(items, again, work) + read - _gone(items, names))
    return max(most) + _away(items, names)  # a neighbour's


def _gone(items: Mapping[Item, float], names: Sequence[str]) -> float:
    """Bytes of the feed-forward, kept or made again with all of its layer, when its backward is
    done."""
    modes = [MODES[name] for name in names]
    whole = any(mode.is_on and not mode.branch for mode in modes)
    alone = {item for mode in modes for item in mode.items} if not whole else set[Item]()
    return sum(size for item, size in items.items() if item in _SECOND and item not in alone)


def _attention_grads(shape: ModelShape, work: StageWork, *, copied: bool) -> float:
    """Of attention in blocks of queries: gradients of what it reads, of what it makes and of that
    by heads, scores of a block and theirs. ``copied``: it makes again what it reads by heads."""
    heads = work.heads(shape)
    kv_heads = work.kv_heads(shape)
    read = heads * shape.key_width + kv_heads * (shape.key_width + shape.value_width)
    made = 2 * heads * shape.value_width
    scores = 2 * heads * min(BLOCK_QUERIES, work.seq_len) * work.samples * work.seq_len
    wide = work.tokens * (shape.d_model + read * (1 + copied) + made) + scores
    return work.wide * wide


def layer_away(
    shape: ModelShape, work: StageWork, *tiers: str, experts: bool, branch: Branch | None = None
) -> float:
    """Bytes that wait elsewhere for backward, of a layer on average; in these tiers."""
    items = layer_items(shape, work, experts=experts, branch=branch)
    return sum(part * _away(items, names, *tiers) for names, part in work.recompute)


def _made_again(items: Mapping[Item, float], names: Iterable[str], work: StageWork) -> float:
    """Bytes of one layer that backward computes again, at most at once; and those on the host."""
    dropped = {item for name in names for item in MODES[name].items}
    by_chunk = {item for name in names if MODES[name].chunk_tokens for item in MODES[name].items}
    part = _at_once(names, work)
    again = sum(items[item] * (part if item in by_chunk else 1) for item in dropped & items.keys())
    return again + _away(items, names)


def _at_once(names: Iterable[str], work: StageWork) -> float:
    """The part of a rank's tokens that the feed-forward takes at once."""
    chunks = (MODES[name].chunk_tokens for name in names)
    return min([1.0, *(chunk / max(work.tokens, 1.0) for chunk in chunks if chunk)])


def _kept(items: Mapping[Item, float], names: Iterable[str]) -> float:
    """Bytes that modes leave of one layer on the device."""
    return _left(items, names) - _away(items, names)


def _away(items: Mapping[Item, float], names: Iterable[str], *tiers: str) -> float:
    """Bytes that they send elsewhere, to these tiers."""
    sent = any(MODES[name].waits in (tiers or ELSEWHERE) for name in names)
    return _left(items, names) if sent else 0.0


def _left(items: Mapping[Item, float], names: Iterable[str]) -> float:
    """Bytes that are not computed again."""
    dropped = {item for name in names for item in MODES[name].items}
    return sum(size for item, size in items.items() if item not in dropped)


def layer_items(
    shape: ModelShape, work: StageWork, *, experts: bool, branch: Branch | None = None
) -> dict[Item, float]:
    """Bytes that one layer, or part of one, keeps where nothing is computed again, by what they
    are."""
    if branch is not None:
        whole = layer_items(shape, work, experts=experts)
        second = {name: whole[name] for name in _SECOND}
        if branch == "feed_forward":
            return {"input": second.pop("ff input"), **second}
        return {name: size for name, size in whole.items() if name not in _SECOND}
    tokens, rows, wide = work.tokens, work.rows, work.wide * work.tokens
    # Gathered norms' results are kept, where they are not gathered again.
    outputs = tokens if work.eager else rows
    entering, masks = work.wide * rows * shape.d_model, shape.dropout * rows * shape.d_model
    read = work.wide * outputs * shape.d_model
    items: dict[Item, float] = {"input": entering}
    if shape.num_heads:
        items = {**items, "attention masks": masks, "attention read": read, "ff input": entering}
    items |= {"ff masks": masks, "ff read": read}
    heads = work.heads(shape)
    items["heads"] = wide * _heads(shape, work)
    if shape.latent is not None:
        low = shape.latent
        items["latent"] = wide * (low.q_rank + low.kv_rank + low.d_rope)
    items["scores"] = heads * _scores(shape, work)
    return {**items, **_feed_forward(shape, work, experts=experts)}


def _heads(shape: ModelShape, work: StageWork) -> float:
    """Numbers of a token in queries, keys, values and what came of them, which is kept on both
    sides of its way back among ranks that divide heads, where attention keeps it."""
    heads = work.heads(shape)
    kv_heads = work.kv_heads(shape)
    again = 0.0
    if work.head_ways > 1:
        kv_heads = max(kv_heads, work.head_ways)
        again = 0.0 if work.eager and work.head_ways == work.share("seq") else heads
    from_all = work.share("seq") / work.head_ways if work.gathers_keys else 1
    both = (heads + kv_heads * from_all) * (shape.key_width + shape.value_width)
    return both + again * shape.value_width


def _scores(shape: ModelShape, work: StageWork) -> float:
    """Of one head; of fused attention, and where keys go round, the logarithms of sums."""
    if work.in_rows:
        return work.wide * work.tokens * work.seq_len
    if work.eager and work.share("seq") == work.head_ways and shape.causal:
        seen = (work.seq_len + BLOCK_QUERIES) / 2
        return work.wide * work.tokens * seen * (work.seq_len <= KEPT_SEQ)
    if work.eager or work.fused_attention:
        return 4 * work.tokens
    return work.tokens * work.seq_len * (2 + 3 * shape.dropout)


def _feed_forward(shape: ModelShape, work: StageWork, *, experts: bool) -> dict[Item, float]:
    """What its activation reads, and what it makes; without a compiler a gate's too."""
    wide, split = work.wide * work.tokens, work.share("d_ff")
    first, again = shape.num_matrices - 1, (work.eager or work.apart) and shape.gated
    if not experts or shape.experts is None:
        width = wide * shape.d_ff / split
        return {"gates": first * width, "hidden": (1 + again) * width}
    mixture = shape.experts
    visits = mixture.top_k * work.expert_visits * work.busiest(mixture)
    width = wide * (visits * mixture.d_ff + mixture.shared_d_ff) / split
    copies = wide * visits * 2 * shape.d_model
    return {"gates": first * width + copies, "hidden": (1 + again) * width}


@lru_cache(maxsize=1 << 14)
def stage_kept(shape: ModelShape, work: StageWork) -> float:
    """Bytes that a whole stage keeps of one microbatch on one rank, logits apart."""
    layers = sum(
        number * layer_kept(shape, each, **kind._asdict())
        for each, kind, number in layers_alike(shape, work)
    )
    embedding = (8 * work.tokens + shape.dropout * work.rows * shape.d_model) * work.embeds
    return layers + embedding + _end_kept(shape, work)


def _end_kept(shape: ModelShape, work: StageWork) -> float:
    """Of the last norm and the head."""
    norm = 2 * work.wide * work.rows * shape.d_model * (work.predicts > 0)
    if 0 < work.predicts < 1:  # a part of the head keeps its logits
        norm += work.wide * work.tokens * shape.vocab_size * work.predicts / work.share("vocab")
    return norm


def sends_away(work: StageWork) -> bool:
    """Some of what layers keep waits elsewhere."""
    return any(MODES[name].waits in ELSEWHERE for names, _ in work.recompute for name in names)


def stage_away(shape: ModelShape, work: StageWork, *tiers: str) -> float:
    """Bytes that a whole stage sends elsewhere of one microbatch on one rank; to these tiers, where
    any are given."""
    if not sends_away(work):
        return 0.0
    return sum(
        number * layer_away(shape, each, *tiers, **kind._asdict())
        for each, kind, number in layers_alike(shape, work)
    )


def stage_working(shape: ModelShape, work: StageWork) -> float:
    """The most that lives while one layer, or the head, computes, beside all that the stage keeps:
    what later layers kept is gone by then."""
    found, before = logits(shape, work), 0.0
    if work.eager:  # what the last norm keeps is gone
        before = _end_kept(shape, work)
    for each, kind, number in reversed(list(layers_alike(shape, work))):
        found = max(found, layer_working(shape, each, **kind._asdict()) - before)
        before += number * layer_kept(shape, each, **kind._asdict())
    return found


def stage_beside(shape: ModelShape, work: StageWork) -> float:
    """Of a processor's memory, what lies beside all that lives: of logits and of what layers need
    the less, and what one layer makes again. They never live at once, but what one leaves free is
    in pieces that do not do for the other."""
    if not work.eager:
        return 0.0
    most = again = 0.0
    for each, kind, _ in layers_alike(shape, work):
        most = max(most, layer_working(shape, each, **kind._asdict()))
        items = layer_items(shape, each, **kind._asdict())
        again = max([again, *(_made_again(items, names, each) for names, _ in each.recompute)])
    return min(logits(shape, work), most) + again


def logits(shape: ModelShape, work: StageWork) -> float:
    """What the head and its loss hold while they compute, beside what is kept; head only.

    Software that makes all logits at once has them in two bytes, in four for the loss, and their
    gradient in four. Weft's own losses have rows of them, by what divides the vocabulary.
    """
    if not (work.predicts and work.tokens):
        return 0.0
    width = shape.vocab_size * work.predicts / work.share("vocab")
    if not work.in_chunks:
        return 10 * work.tokens * width
    if work.predicts < 1:
        return _in_parts(shape, work, width)
    if work.share("vocab") > 1:
        return _divided(shape, work, width)
    return _whole_rows(shape, work, width)


def _whole_rows(shape: ModelShape, work: StageWork, width: float) -> float:
    """Of ``weft/nn/losses.py``: gradients are made in the forward, that of the weight in four
    bytes; a product of two bytes is added to it, of which a processor makes four first."""
    is_compiled = not (work.eager or work.apart)
    chunk = CHUNK_LOGITS if work.eager else CHUNK_COMPILED if is_compiled else CHUNK_ELSEWHERE
    logits = min(work.tokens, max(CHUNK_TOKENS, chunk // width)) * width
    hidden = work.wide * work.tokens * shape.d_model
    weight = width * shape.d_model * (not work.frozen)
    narrow = work.wide % 4  # what is made beside four bytes
    product = narrow + 4 * (narrow > 0 and work.eager)
    if is_compiled:  # logits become their gradients, and sums are not rounded
        return hidden + max(
            work.wide * logits + 4 * weight, (narrow + 4) * weight, hidden + 2 * work.wide * weight
        )
    most = (
        (work.wide + 4 * (narrow > 0) + 4) * logits + 4 * weight,  # the softmax
        (narrow + 4) * logits + 4 * weight,
        work.wide * logits + (4 + product) * weight,
        hidden + 2 * work.wide * weight,  # backward, which scales both
    )
    return hidden + max(most)


def _divided(shape: ModelShape, work: StageWork, width: float) -> float:
    """Of a head split along the vocabulary (``weft/parallel/split_vocab.py``), which keeps its
    probabilities in four bytes for backward; hidden states and weight get gradients row by row."""
    tokens, hidden = work.tokens, work.wide * work.tokens * shape.d_model
    rows, weight = min(tokens, PART_TOKENS), work.wide * width * shape.d_model * (not work.frozen)
    narrow = work.wide % 4
    forward = 4 * tokens * width + (12 + narrow) * rows * width
    if rows == tokens:
        return max(forward, work.wide * rows * width + weight + hidden, 2 * hidden)
    return max(forward, 4 * max(tokens - 3 * rows, 0) * width + 2 * (weight + hidden))


def _in_parts(shape: ModelShape, work: StageWork, width: float) -> float:
    """Of a part of the head (``weft/nn/rows_loss.py``), whose logits are kept: rows of them in four
    bytes, and gradients of all."""
    rows, narrow = min(work.tokens, PART_TOKENS) * width, work.wide % 4
    grads = work.wide * work.tokens * width
    weight = width * shape.d_model * (not work.frozen)
    most = (
        (8 + 2 * narrow) * rows,
        grads + (4 + 2 * narrow) * rows,
        work.wide * (weight + work.tokens * shape.d_model),  # the logits are gone
    )
    return max(most)

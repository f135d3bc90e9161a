"""The operations of a stage, one by one: sizes, FLOPs and bytes moved, before any chip is named."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from weft.cost.work import StageWork, layers_by_kind
from weft.models.shape import Branch, ModelShape
from weft.recompute.core import GOES_ROUND

Phase = Literal["forward", "input_grad", "weight_grad"]
PHASES: tuple[Phase, ...] = ("forward", "input_grad", "weight_grad")
OpKind = Literal["matmul", "batched", "attention", "elementwise"]
_FLOPS: dict[OpKind, tuple[float, float, float]] = {
    "matmul": (1, 1, 1),
    "batched": (1, 2, 0),
    "attention": (1, 2.5, 0),
    "elementwise": (0, 0, 0),
}
"""By phase: how many times those of the forward."""
_MOVES: dict[OpKind, tuple[float, float, float]] = {
    "matmul": (1, 1, 1),
    "batched": (0, 2, 0),
    "attention": (1, 3, 0),
    "elementwise": (0, 2, 0),
}
"""By phase: how many times its operands, or its bytes where it is no product, are counted."""


class Op(NamedTuple):
    """One operation of a forward on one rank. Fractional sizes are averages."""

    name: str
    kind: OpKind
    m: float = 0.0
    n: float = 0.0
    k: float = 0.0
    repeat: float = 1.0
    """How often, with the same sizes."""
    num_bytes: float = 0.0
    """Moved through memory besides the operands of a matrix product."""

    @property
    def flops(self) -> float:
        """A multiply and an add counted apart."""
        return 2 * self.m * self.n * self.k * self.repeat

    def phase_flops(self, phase: Phase) -> float:
        """FLOPs of one phase.

        Each half of a weight's backward costs a forward. Attention and products of activations
        have no weights: all their backward is for the input. A fused attention computes its scores
        a second time there (arXiv 2205.14135): five products instead of two.
        """
        return _FLOPS[self.kind][PHASES.index(phase)] * self.flops

    def phase_bytes(self, phase: Phase) -> float:
        """Bytes moved in one phase: operands and results of products, once each, in two bytes."""
        operands = 2 * (self.m * self.k + self.k * self.n + self.m * self.n) * self.repeat
        by_product = self.kind in ("matmul", "batched")
        return _MOVES[self.kind][PHASES.index(phase)] * (operands if by_product else self.num_bytes)


@lru_cache(maxsize=1 << 14)
def layer_ops(shape: ModelShape, work: StageWork, *, experts: bool) -> tuple[Op, ...]:
    """One decoder layer's forward of one microbatch; ``experts``: its feed-forward is a mixture."""
    feed_forward = _expert_ops(shape, work) if experts else _feed_forward_ops(shape, work)
    attention = _attention_ops(shape, work) if shape.num_heads else ()
    return (*attention, *feed_forward, *_residual_ops(shape, work))


@lru_cache(maxsize=1 << 12)
def branch_ops(
    shape: ModelShape, work: StageWork, branch: Branch, *, experts: bool
) -> tuple[tuple[Op, float], ...]:
    """Likewise one part of a layer, and what part of each operation: norms and additions count as
    the layer's, one for each part."""
    feed_forward = _expert_ops(shape, work) if experts else _feed_forward_ops(shape, work)
    own = _attention_ops(shape, work) if branch == "attention" else feed_forward
    shared = _residual_ops(shape, work)
    return (*((op, 1.0) for op in own), *((op, 1 / shape.branches) for op in shared))


def _attention_ops(shape: ModelShape, work: StageWork) -> Iterator[Op]:
    tokens, heads = work.tokens, work.heads(shape)
    if shape.latent is None:
        kv_heads = work.kv_heads(shape)
        width = shape.d_head * (heads + 2 * kv_heads)
        yield Op("qkv", "matmul", tokens, width, shape.d_model)
    else:
        low = shape.latent
        down, entering = low.q_rank + low.kv_rank + low.d_rope, low.q_rank or shape.d_model
        yield Op("latent down", "matmul", tokens, down, shape.d_model)
        yield Op("query up", "matmul", tokens, heads * shape.key_width, entering)
        yield Op("value up", "matmul", tokens, heads * (low.d_nope + low.d_value), low.kv_rank)
    yield from _core_ops(shape, work, heads)
    yield Op("out", "matmul", tokens, shape.d_model, heads * shape.value_width)
    if work.apart and shape.rotates:
        yield _rotation_op(shape, work, heads)
    if work.frozen:
        yield _adapters_op(shape, work)


def _core_ops(shape: ModelShape, work: StageWork, heads: float) -> Iterator[Op]:
    """Scores, softmax and values. A fused kernel skips what the causal mask hides."""
    per_rank, count = work.seq_len / work.share("seq"), heads * work.samples
    if work.fused_attention and not work.in_rows:
        widths = shape.key_width + shape.value_width
        moved = 4 * work.tokens * heads * widths
        name = GOES_ROUND if work.eager and work.share("seq") > work.head_ways else "attention"
        yield Op(name, "attention", per_rank, work.seq_len * shape.seen, widths, count, moved)
        return
    yield Op("scores", "batched", per_rank, work.seq_len, shape.key_width, count)
    yield Op("values", "batched", per_rank, shape.value_width, work.seq_len, count)
    yield softmax_op(count * per_rank * work.seq_len, dropout=shape.dropout)


def softmax_op(elements: float, *, dropout: bool) -> Op:
    """Of scores in memory: two bytes read and written; dropout's mask is one."""
    return Op("softmax", "elementwise", num_bytes=(4 + 5 * dropout) * elements)


def _rotation_op(shape: ModelShape, work: StageWork, heads: float) -> Op:
    """Of queries and keys, where no compiler makes it part of what is beside it: a product (2 bytes
    read, 2 written), halves swapped (4) and both added up (8)."""
    if shape.latent is None:
        kv_heads = work.kv_heads(shape)
        width = shape.d_head * (heads + kv_heads)
    else:
        width = shape.latent.d_rope * (heads + 1)
    return Op("rotation", "elementwise", num_bytes=14 * work.tokens * width)


def _adapters_op(shape: ModelShape, work: StageWork) -> Op:
    """Of low rank beside attention's frozen products, which they hardly compute for: dropout of
    what enters (2 bytes read, 3 written), its way to few columns (2), the way back (2), and the sum
    with what the frozen one gave (6)."""
    entering = shape.d_model + work.heads(shape) * shape.value_width
    heads = (work.heads(shape) + 2 * work.kv_heads(shape)) * shape.d_head
    moved = 7 * entering + 8 * (heads + shape.d_model)
    return Op("adapters", "elementwise", num_bytes=work.tokens * moved)


def _feed_forward_ops(shape: ModelShape, work: StageWork) -> Iterator[Op]:
    tokens, width = work.tokens, shape.d_ff / work.share("d_ff")
    yield Op("up", "matmul", tokens, width * (shape.num_matrices - 1), shape.d_model)
    name = "activation" if shape.gated else "plain activation"
    # A gate's activation alone is read and written once more.
    passes = shape.num_matrices + 2 * (work.apart and shape.gated)
    yield Op(name, "elementwise", num_bytes=2 * tokens * width * passes)
    yield Op("down", "matmul", tokens, shape.d_model, width)


def _expert_ops(shape: ModelShape, work: StageWork) -> Iterator[Op]:
    """Each rank computes its share of the experts for all that share them, and the last one is
    waited for."""
    assert shape.experts is not None, "a layer of experts in a shape without"
    experts, tokens = shape.experts, work.tokens
    yield Op("router", "matmul", tokens, experts.num_experts, shape.d_model)
    local = max(experts.num_experts / work.share("experts") * work.expert_part, 1.0)
    visits = tokens * experts.top_k * work.expert_visits * work.busiest(experts)
    many, gates = local * work.expert_pieces, shape.num_matrices - 1
    each = visits / many
    width = experts.d_ff / work.share("d_ff")
    yield Op("expert up", "matmul", each, width * gates, shape.d_model, many)
    yield Op("expert down", "matmul", each, shape.d_model, width, many)
    passes = shape.num_matrices + 2 * (work.apart and shape.gated)
    moved = 2 * visits * (width * passes + 4 * shape.d_model)
    yield Op("activation and permutation", "elementwise", num_bytes=moved)
    if experts.shared_d_ff:
        shared = experts.shared_d_ff / work.share("d_ff")
        yield Op("shared up", "matmul", tokens, shared * gates, shape.d_model)
        yield Op("shared down", "matmul", tokens, shape.d_model, shared)


@lru_cache(maxsize=1 << 12)
def experts_part(shape: ModelShape, work: StageWork) -> float:
    """Of the products of a layer of experts, those of experts: by their operations."""
    ops = layer_ops(shape, work, experts=True)
    own = sum(op.flops for op in ops if op.name.startswith("expert "))
    return own / sum(op.flops for op in ops)


def _residual_ops(shape: ModelShape, work: StageWork) -> Iterator[Op]:
    """Norms (read, write) and additions (read twice, write; dropout's mask is one byte)."""
    per_channel = shape.branches * (4 + 6 + 1 * shape.dropout)
    yield Op(
        "norms and residuals", "elementwise", num_bytes=per_channel * work.rows * shape.d_model
    )
    narrow = 1 - work.wide_products
    if (
        work.dtype == "fp8" and narrow
    ):  # operands are read in two bytes and written in one, for four products
        values = work.heads(shape) * shape.value_width
        width = shape.d_model * 2 + shape.d_ff / work.share("d_ff") + values
        yield Op("casts", "elementwise", num_bytes=3 * narrow * work.tokens * width)


@lru_cache(maxsize=1 << 12)
def head_ops(shape: ModelShape, work: StageWork) -> tuple[Op, ...]:
    """Last norm, head and loss of one microbatch. Logits stay in two bytes, the loss in four."""
    width = shape.vocab_size * work.predicts / work.share("vocab")
    return (
        Op("last norm", "elementwise", num_bytes=4 * work.rows * shape.d_model),
        Op("head", "matmul", work.tokens, width, shape.d_model),
        Op("loss", "elementwise", num_bytes=10 * work.tokens * width),
    )


def stage_ops(shape: ModelShape, work: StageWork) -> Iterator[tuple[Op, float]]:
    """Every operation of a stage's forward, and in how many layers it occurs."""
    for (experts, branch), number in layers_by_kind(shape, work.layers):
        if branch is None:
            yield from ((op, number) for op in layer_ops(shape, work, experts=experts))
        else:
            yield from branch_ops(shape, work, branch, experts=experts)
    if work.embeds:
        # Read rows, write them.
        yield Op("embedding", "elementwise", num_bytes=4 * work.tokens * shape.d_model), 1
    if work.predicts:
        yield from ((op, 1) for op in head_ops(shape, work))

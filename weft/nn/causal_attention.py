"""Softmax attention to earlier tokens: PyTorch's fused kernels, or blocks of queries.

Packed documents never cost a mask over all pairs of tokens: a kernel takes them as they lie, or
each block of queries sees the keys from where its first query's document begins.

On a CPU PyTorch's fused kernel spends its time in small products. One batched product a block of
64 queries, over the keys they may see, is faster at every length tried and most so in bf16
(``docs/performance.md``), and needs no more memory once the sequence is long.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.nn.documents import Packed
from weft.nn.moved import in_order
from weft.nn.norm import wide_dtype
from weft.nn.varlen import has_kernel, packed_attention

BLOCK_QUERIES = 64
"""Queries a block: more skip fewer masked keys, fewer make small products."""
KEEP_SEQ = 512
"""Up to this length probabilities are kept for the backward pass; beyond, made again."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, packed: Packed | None) -> Tensor:
    """``softmax(q k^T / sqrt(d_head)) v`` over the keys that each query may see.

    ``q`` ``[batch, seq, heads, d_head]``; ``k`` and ``v`` ``[batch, keys, kv_heads, d_head]``, each
    shared by ``heads / kv_heads`` queries; the result is as ``q``. Values may have another width
    than keys: the result has theirs. A query sees
    its own token and the earlier ones of its document; ``packed`` None: of its sample. Where there
    are more keys, queries are of the last tokens, and ``packed`` is ``Packed.ending``'s.
    """
    if not len(q):  # nothing, with gradients that are zero
        nothing = v.new_zeros((*q.shape[:-1], v.shape[-1]))
        return nothing + (q.sum() + k.sum() + v.sum())
    if packed is not None and packed.places is not None:
        return in_order(causal_attention, (q, k, v), packed)
    if packed is not None and has_kernel(q, packed):
        return packed_attention(q, k, v, packed)
    if packed is not None or q.device.type == "cpu":
        first = None if packed is None else packed.first
        result: Tensor = _BlockedAttention.apply(q, k, v, first)  # type: ignore[no-untyped-call]
        return result
    same = q.shape[1] == k.shape[1]
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2),  # [batch, heads, seq, d_head]
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if same else _of_the_last(q.shape[1], k.shape[1]),
        is_causal=same,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return mixed.transpose(1, 2)


def _of_the_last(queries: int, keys: int) -> Tensor:
    """The causal mask of the last queries of so many, which no kernel makes."""
    from torch.nn.attention.bias import causal_lower_right  # imports PyTorch's compiler

    return causal_lower_right(queries, keys)


class _BlockedAttention(torch.autograd.Function):
    """With ``p = softmax(s)``: ``ds = p (dp - sum(p dp))``, then the products' own rules.

    Inside, the queries that share a key head are rows of one product: ``[n, group, seq, d_head]``
    against keys ``[n, keys, d_head]``, where ``n = batch * kv_heads``.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, first: Tensor | None) -> Tensor:
        batch, kv_heads = k.shape[0], k.shape[2]
        queries, keys, values = by_key_head(q, kv_heads), by_head(k), by_head(v)
        result = values.new_empty((*queries.shape[:-1], values.shape[-1]))
        kept = []
        ctx.blocks, later = _blocks(q.shape[1], k.shape[1], first), _later(q)
        for block in ctx.blocks:
            p = _probabilities(queries, keys, block, later, first)
            mixed = torch.bmm(p, values[:, block.keys])
            result[:, :, block.queries] = mixed.view_as(result[:, :, block.queries])
            if k.shape[1] <= KEEP_SEQ:
                kept.append(p)
        ctx.save_for_backward(queries, keys, values, first, *kept)
        ctx.batch = batch
        return from_head(result.flatten(0, 1), batch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        queries, keys, values, first, *kept = ctx.saved_tensors
        d_result = by_key_head(grad, keys.shape[0] // ctx.batch)
        d_queries = torch.empty_like(queries)
        d_keys, d_values = (torch.zeros_like(x, dtype=wide_dtype(keys)) for x in (keys, values))
        scale = queries.shape[-1] ** -0.5
        later = None if kept else _later(grad)
        for i, block in enumerate(ctx.blocks):
            rows, seen = queries[:, :, block.queries], keys[:, block.keys]
            p = _probabilities(queries, keys, block, later, first) if later is not None else kept[i]
            d_rows = d_result[:, :, block.queries].flatten(1, 2)  # [n, group * block, d_head]
            add_product(d_values[:, block.keys], p.mT, d_rows)
            d_p = torch.bmm(d_rows, values[:, block.keys].mT)
            d_scores = torch._softmax_backward_data(d_p, p, -1, p.dtype)
            d_queries[:, :, block.queries] = torch.bmm(d_scores, seen).view_as(rows)
            add_product(d_keys[:, block.keys], d_scores.mT, rows.flatten(1, 2))
        d_queries *= scale
        d_keys *= scale
        d_k, d_v = (from_head(x.to(keys.dtype), ctx.batch) for x in (d_keys, d_values))
        return from_head(d_queries.flatten(0, 1), ctx.batch), d_k, d_v, None


class _Block(NamedTuple):
    """Queries that are done at once, and the keys that one of them may see."""

    queries: slice
    keys: slice
    is_causal: bool
    """Every query sees all of these keys up to its own."""


def _blocks(seq: int, num_keys: int, first: Tensor | None) -> list[_Block]:
    """The blocks of a sample; of packed ones those keys that all samples' queries need."""
    before = num_keys - seq
    ends = [(low, min(low + BLOCK_QUERIES, seq)) for low in range(0, seq, BLOCK_QUERIES)]
    if first is None:
        return [_Block(slice(*each), slice(0, before + each[1]), is_causal=True) for each in ends]
    if first.device.type != "cpu" or torch.compiler.is_compiling():  # asking would wait
        return [_Block(slice(*each), slice(0, before + each[1]), is_causal=False) for each in ends]
    least = first[:, ::BLOCK_QUERIES].amin(0).tolist()  # places never go back
    most = first[:, [high - 1 for _, high in ends]].amax(0).tolist()
    return [
        _Block(slice(*each), slice(begin, before + each[1]), is_causal=begin == last)
        for each, begin, last in zip(ends, least, most, strict=True)
    ]


def add_product(total: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """``total += scale * a @ b``, without a copy of the product where the dtypes agree."""
    if total.dtype == a.dtype:
        total.baddbmm_(a, b, alpha=scale)
    else:
        total.add_(torch.bmm(a, b), alpha=scale)


def by_head(x: Tensor) -> Tensor:
    """``[batch, seq, heads, d_head]`` to contiguous ``[batch * heads, seq, d_head]``."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def by_key_head(x: Tensor, kv_heads: int) -> Tensor:
    """``[batch, seq, heads, d_head]`` to contiguous ``[n, group, seq, d_head]``."""
    batch, seq, heads, d_head = x.shape
    grouped = x.reshape(batch, seq, kv_heads, heads // kv_heads, d_head).permute(0, 2, 3, 1, 4)
    return grouped.flatten(0, 1).contiguous()


def from_head(x: Tensor, batch: int) -> Tensor:
    """The inverse of ``by_head``, not contiguous."""
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2)


def _later(like: Tensor) -> Tensor:
    """Of the queries of a block and their own keys: the key comes after the query."""
    size = (BLOCK_QUERIES, BLOCK_QUERIES)
    return torch.ones(size, dtype=torch.bool, device=like.device).triu(1)


def _probabilities(
    queries: Tensor, keys: Tensor, block: _Block, later: Tensor, first: Tensor | None
) -> Tensor:
    """``[n, group, seq, d_head]`` against ``[n, seq, d_head]`` to ``[n, group * block, seen]``."""
    queries, keys = queries[:, :, block.queries], keys[:, block.keys]
    rows, seen = queries.shape[2], keys.shape[1]
    scores = torch.bmm(queries.flatten(1, 2), keys.mT)
    scores *= queries.shape[-1] ** -0.5
    by_row = scores.view(-1, rows, seen)
    by_row[..., seen - rows :].masked_fill_(later[:rows, :rows], -torch.inf)
    if first is not None and not block.is_causal:
        by_query = scores.view(len(first), -1, rows, seen)  # [batch, heads, block, seen]
        places = torch.arange(block.keys.start, block.keys.stop, device=scores.device)
        other = places < first[:, block.queries, None]  # [batch, block, seen]
        by_query.masked_fill_(other[:, None], -torch.inf)
    return torch.softmax(scores, dim=-1)

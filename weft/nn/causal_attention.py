"""Softmax attention to earlier tokens: PyTorch's fused kernels, or blocks of queries on a CPU.

On a CPU PyTorch's fused kernel spends its time in small products. One batched product a block of
64 queries, over the keys they may see, is faster at every length tried and most so in bf16
(``docs/performance.md``), and needs no more memory once the sequence is long.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.nn.norm import wide_dtype

BLOCK_QUERIES = 64
"""Queries a block: more skip fewer masked keys, fewer make small products."""
KEEP_SEQ = 512
"""Up to this length probabilities are kept for the backward pass; beyond, made again."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """``softmax(q k^T / sqrt(d_head)) v`` over the keys that each query may see.

    ``q`` and the result ``[batch, seq, heads, d_head]``; ``k`` and ``v``
    ``[batch, seq, kv_heads, d_head]``, each shared by ``heads / kv_heads`` queries. ``mask`` is
    bool ``[batch, 1, seq, seq]``, True where a query may look and never beyond the diagonal;
    None: all earlier tokens and the query's own.
    """
    if q.device.type == "cpu":
        result: Tensor = _BlockedAttention.apply(q, k, v, mask)  # type: ignore[no-untyped-call]
        return result
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2),  # [batch, heads, seq, d_head]
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return mixed.transpose(1, 2)


class _BlockedAttention(torch.autograd.Function):
    """With ``p = softmax(s)``: ``ds = p (dp - sum(p dp))``, then the products' own rules.

    Inside, the queries that share a key head are rows of one product: ``[n, group, seq, d_head]``
    against keys ``[n, seq, d_head]``, where ``n = batch * kv_heads``.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        batch, kv_heads = k.shape[0], k.shape[2]
        queries, keys, values = _by_key_head(q, kv_heads), _by_head(k), _by_head(v)
        result = torch.empty_like(queries)
        kept = []
        hidden = _hidden(mask, q)
        for low, high in _blocks(q.shape[1]):
            p = _probabilities(queries[:, :, low:high], keys[:, :high], hidden, batch)
            mixed = torch.bmm(p, values[:, :high])
            result[:, :, low:high] = mixed.view_as(result[:, :, low:high])
            if q.shape[1] <= KEEP_SEQ:
                kept.append(p)
        ctx.save_for_backward(queries, keys, values, mask, *kept)
        ctx.batch = batch
        return _from_head(result.flatten(0, 1), batch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        queries, keys, values, mask, *kept = ctx.saved_tensors
        d_result = _by_key_head(grad, keys.shape[0] // ctx.batch)
        d_queries = torch.empty_like(queries)
        d_keys, d_values = (torch.zeros_like(x, dtype=wide_dtype(keys)) for x in (keys, values))
        scale = queries.shape[-1] ** -0.5
        hidden = None if kept else _hidden(mask, grad)
        for i, (low, high) in enumerate(_blocks(queries.shape[2])):
            rows = queries[:, :, low:high]
            if hidden is None:
                p = kept[i]
            else:
                p = _probabilities(rows, keys[:, :high], hidden, ctx.batch)
            d_rows = d_result[:, :, low:high].flatten(1, 2)  # [n, group * block, d_head]
            _add_product(d_values[:, :high], p.mT, d_rows)
            d_p = torch.bmm(d_rows, values[:, :high].mT)
            d_scores = torch._softmax_backward_data(d_p, p, -1, p.dtype)
            d_queries[:, :, low:high] = torch.bmm(d_scores, keys[:, :high]).view_as(rows)
            _add_product(d_keys[:, :high], d_scores.mT, rows.flatten(1, 2))
        d_queries *= scale
        d_keys *= scale
        d_k, d_v = (_from_head(x.to(keys.dtype), ctx.batch) for x in (d_keys, d_values))
        return _from_head(d_queries.flatten(0, 1), ctx.batch), d_k, d_v, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, without a copy of the product where the dtypes agree."""
    if total.dtype == a.dtype:
        total.baddbmm_(a, b)
    else:
        total += torch.bmm(a, b)


def _hidden(mask: Tensor | None, like: Tensor) -> Tensor:
    """Where a query may not look: ``[batch, 1, seq, seq]``, or of one causal block."""
    if mask is not None:
        return ~mask
    size = (BLOCK_QUERIES, BLOCK_QUERIES)
    return torch.ones(size, dtype=torch.bool, device=like.device).triu(1)


def _blocks(seq: int) -> list[tuple[int, int]]:
    return [(low, min(low + BLOCK_QUERIES, seq)) for low in range(0, seq, BLOCK_QUERIES)]


def _by_head(x: Tensor) -> Tensor:
    """``[batch, seq, heads, d_head]`` to contiguous ``[batch * heads, seq, d_head]``."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def _by_key_head(x: Tensor, kv_heads: int) -> Tensor:
    """``[batch, seq, heads, d_head]`` to contiguous ``[n, group, seq, d_head]``."""
    batch, seq, heads, d_head = x.shape
    grouped = x.reshape(batch, seq, kv_heads, heads // kv_heads, d_head).permute(0, 2, 3, 1, 4)
    return grouped.flatten(0, 1).contiguous()


def _from_head(x: Tensor, batch: int) -> Tensor:
    """The inverse of ``_by_head``, not contiguous."""
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2)


def _probabilities(queries: Tensor, keys: Tensor, hidden: Tensor, batch: int) -> Tensor:
    """``[n, group, block, d_head]`` against ``[n, seen, d_head]`` to ``[n, group * block, seen]``.

    The block's queries are the last of the keys seen. ``hidden`` comes from ``_hidden``.
    """
    rows, seen = queries.shape[2], keys.shape[1]
    scores = torch.bmm(queries.flatten(1, 2), keys.mT)
    scores *= queries.shape[-1] ** -0.5
    by_query = scores.view(batch, -1, rows, seen)  # [batch, heads, block, seen]
    if hidden.ndim == 2:
        by_query[..., seen - rows :].masked_fill_(hidden[:rows, :rows], -torch.inf)
    else:
        by_query.masked_fill_(hidden[:, :, seen - rows : seen, :seen], -torch.inf)
    return torch.softmax(scores, dim=-1)

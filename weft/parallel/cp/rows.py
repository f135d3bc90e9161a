"""Ring self-attention of the original sequence parallelism (arXiv 2105.13120).

Each rank has its queries all the time. First the keys go round and give it the whole row of scores
of each query, then the values do, which it adds up with their softmax. Memory of scores grows with
the square of the length and falls with the number of ranks. Backward sends values and keys round
again, and the gradients of each, in fp32 or fp64, until they are back where they are from. Those
are whole sums: the original divides them by the number of ranks, and is right only where the loss
is multiplied by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.axes.held import Ranges
from weft.nn.attention_parts import Sight
from weft.nn.causal_attention import by_head, by_key_head, from_head
from weft.nn.documents import Packed
from weft.nn.norm import wide_dtype
from weft.parallel.cp.gathered import tokens_in
from weft.parallel.cp.ring import Ring
from weft.parallel.runtime import Sum


class Rows:
    """Attention of this rank's queries to the keys and values of all ranks."""

    def __init__(self, total: Sum, *, causal: bool) -> None:
        self._ring = Ring(total, causal=causal)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed | None) -> Tensor:
        """``q`` and the result ``[batch, own seq, heads, d_head]``, ``k`` and ``v`` likewise."""
        ring, seq = self._ring, sum(sum(map(len, slots)) for slots in self._ring.parts)
        if packed is None or packed.places is None:
            sight = Sight.of(q, packed, ring.own, causal=ring.causal)
            hidden = sight.hidden(slice(None), range(seq))
        else:
            own = tokens_in(packed.places, ring.own)
            hidden = Sight.moved(packed, own, causal=ring.causal).hides(packed.places)
        mixed: Tensor = _Attention.apply(q, k, v, hidden, ring)  # type: ignore[no-untyped-call]
        return mixed


class _Attention(torch.autograd.Function):
    """Kept for backward: this rank's queries, keys and values, and probabilities of whole rows.

    Inside, the queries that share a key head are rows of one product: ``[n, group * own seq,
    d_head]``, where ``n = batch * kv_heads``.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, ring: Ring
    ) -> Tensor:
        queries, seq = _rows(q, k), sum(sum(map(len, places)) for places in ring.parts)
        scores = queries.new_empty((*queries.shape[:2], seq), dtype=wide_dtype(q))
        for number, held in ring.round(k, ring.all):
            for columns, keys in _columns(ring.parts[number], held):
                scores[..., columns] = torch.bmm(queries, keys.mT)
        scores *= q.shape[-1] ** -0.5
        if hidden is not None:
            by_sample = scores.view(len(hidden), -1, q.shape[1], seq)
            by_sample.masked_fill_(hidden[:, None], -torch.inf)
        p = torch.softmax(scores, dim=-1).to(q.dtype)
        mixed = queries.new_zeros((*queries.shape[:2], v.shape[3]), dtype=wide_dtype(q))
        for number, held in ring.round(v, ring.all):
            for columns, values in _columns(ring.parts[number], held):
                mixed += torch.bmm(p[..., columns], values)
        ctx.save_for_backward(q, k, v, p)
        ctx.ring = ring
        return _by_token(mixed, q)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, p = ctx.saved_tensors
        ring: Ring = ctx.ring
        batch, wide = len(q), wide_dtype(q)
        queries, d_rows = _rows(q, k), _rows(grad, k)
        d_p, d_q = torch.empty_like(p), torch.zeros_like(queries, dtype=wide)

        def of_values(number: int, held: Tensor) -> Tensor:
            found = []
            for columns, values in _columns(ring.parts[number], held):
                d_p[..., columns] = torch.bmm(d_rows, values.mT)
                found.append(torch.bmm(p[..., columns].mT, d_rows).to(wide))
            return from_head(torch.cat(found, dim=1), batch)

        d_v = ring.returned(v, ring.all, of_values)
        d_scores = torch._softmax_backward_data(d_p, p, -1, p.dtype)
        d_scores *= q.shape[-1] ** -0.5

        def of_keys(number: int, held: Tensor) -> Tensor:
            found = []
            for columns, keys in _columns(ring.parts[number], held):
                d_q.add_(torch.bmm(d_scores[..., columns], keys))
                found.append(torch.bmm(d_scores[..., columns].mT, queries).to(wide))
            return from_head(torch.cat(found, dim=1), batch)

        d_k = ring.returned(k, ring.all, of_keys)
        return _by_token(d_q, q), d_k.to(k.dtype), d_v.to(v.dtype), None, None


def _rows(x: Tensor, k: Tensor) -> Tensor:
    """``[batch, seq, heads, d_head]`` of queries to rows that share a key head."""
    return by_key_head(x, k.shape[2]).flatten(1, 2)


def _by_token(x: Tensor, q: Tensor) -> Tensor:
    """The inverse of ``_rows``, as many and of the dtype as the queries."""
    return from_head(x.view(-1, *q.shape[1:2], x.shape[-1]), len(q)).to(q.dtype)


def _columns(places: Ranges, held: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Of what a rank holds ``[batch, seq, kv_heads, d_head]``, a part each: where it is in rows of
    scores, and ``[n, part, d_head]``."""
    for part, some in zip(places, torch.split(held, [*map(len, places)], dim=1), strict=True):
        yield slice(part.start, part.stop), by_head(some)

"""A ring whose attention is that of PyTorch's fused kernels, as accelerators have them.

What the ring does is as in ``ring``; here a rank's queries meet the keys of another as runs of
consecutive tokens. Of one of its own documents a run sees all of what another rank has, up to one
place, for no token of that rank is between its own; and of its own rank all before it, and itself
as far as each token is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.nn.documents import Packed
from weft.nn.fused_parts import Found, Runs, kernel_for
from weft.nn.norm import wide_dtype
from weft.parallel.cp.ring import Ring, Travel, by_rank, going_round
from weft.parallel.runtime import Sum


class FusedRing:
    """Attention of this rank's queries to the keys and values of all ranks."""

    def __init__(self, total: Sum, *, causal: bool) -> None:
        self._ring = Ring(total, causal=causal)
        self._met_whole = lru_cache(maxsize=8)(partial(_met_whole, self._ring))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed | None) -> Tensor:
        """``q`` and the result ``[batch, own seq, heads, d_head]``, ``k`` and ``v`` likewise."""
        if packed is None:
            met = self._met_whole(len(q))
        else:
            met = _met(packed if packed.host is None else packed.host, self._ring)
        attend = partial(_Attention.apply, met, self._ring)
        return self._ring.ascending(attend, (q, k, v), packed)


class _Met(NamedTuple):
    """What this rank's queries see of the keys of each rank, and what of these goes round."""

    travel: Travel
    runs: Sequence[Sequence[Runs]]
    """By rank; what is first of a rank's own is half of it."""


class _Attention(torch.autograd.Function):
    """Kept for backward: this rank's queries, keys, values and result; logarithms of sums."""

    @staticmethod
    def forward(ctx: Any, met: _Met, ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kernel = kernel_for(q, v)
        assert kernel is not None, q
        queries, widths = q.flatten(0, 1), [k.shape[3], v.shape[3]]
        found = Found.nothing(queries, v.shape[3])
        for number, held in ring.round(torch.cat((k, v), dim=3), met.travel.on(q.device)):
            keys, values = torch.split(held.flatten(0, 1), widths, dim=2)
            for runs in met.runs[number]:
                call = kernel(runs, q.device)
                found.add(call.rows, *call.forward(queries, keys, values))
        result = found.mixed.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, found.log_sums)
        ctx.asked = met, ring, kernel
        return result.view(*q.shape[:3], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, Tensor, Tensor]:
        q, k, v, *kept = ctx.saved_tensors
        met, ring, kernel = ctx.asked
        found, wide = Found(*kept), wide_dtype(q)
        queries, d_result, widths = q.flatten(0, 1), grad.flatten(0, 1), [k.shape[3], v.shape[3]]
        d_q, own = torch.zeros_like(queries, dtype=wide), torch.cat((k, v), dim=3)

        def add(number: int, some: slice, held: Tensor, d_held: Tensor) -> Tensor:
            keys, values = torch.split(held.flatten(0, 1), widths, dim=2)
            for runs in met.runs[number][some]:
                call = kernel(runs, q.device)
                of_queries, *of_both = call.backward(d_result, (queries, keys, values), found)
                d_q.index_add_(0, call.rows, of_queries.to(wide))
                rows = d_held.view(-1, *d_held.shape[2:])
                rows.index_add_(0, call.keys, torch.cat(of_both, dim=2).to(wide))
            return d_held

        def gradient(number: int, held: Tensor) -> Tensor:
            some = slice(1) if held is own else slice(None)
            return add(number, some, held, torch.zeros_like(held, dtype=wide))

        rest = partial(add, ring.group.position, slice(1, None), own)
        d_own = ring.returned(own, met.travel.on(q.device), gradient, rest)
        d_k, d_v = torch.split(d_own, widths, dim=3)
        return None, None, d_q.view_as(q).to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


def _met_whole(ring: Ring, batch: int) -> _Met:
    """Of samples that are one document each: the same in each step."""
    seq = sum(ring.all.many)
    packed = Packed(torch.zeros(batch, seq, dtype=torch.int32), None)
    tokens = by_rank(packed, ring.parts)
    return _Met(ring.all, _runs(packed, tokens, tokens, ring))


def _met(packed: Packed, ring: Ring) -> _Met:
    of_ranks = by_rank(packed, ring.parts)
    travel, there = going_round(packed, of_ranks, ring)
    return _Met(travel, _runs(packed, of_ranks, there, ring))


def _runs(
    packed: Packed, of_ranks: Sequence[Tensor], there: Sequence[Tensor], ring: Ring
) -> list[list[Runs]]:
    """By rank, what this one's queries see of the tokens that are ``there`` ``[batch, n]``."""
    position = ring.group.position
    tokens = of_ranks[position]
    first, ends = (x.gather(1, tokens).long() for x in (packed.first, packed.ends))
    begins = torch.ones_like(tokens, dtype=torch.bool)
    begins[:, 1:] = (first[:, 1:] != first[:, :-1]) | (tokens[:, 1:] != tokens[:, :-1] + 1)
    starts = begins.flatten().nonzero()[:, 0]
    lengths = torch.diff(starts, append=starts.new_tensor([tokens.numel()]))
    sample = packed.first.shape[1] * torch.arange(len(tokens))[:, None]  # where tokens begin
    low = (first + sample).flatten()[starts]
    high = ((tokens if ring.causal else ends) + sample).flatten()[starts]
    before = torch.arange(len(low)) - torch.searchsorted(low, low)  # runs of the same document
    found = []
    for number, theirs in enumerate(there):
        every = (theirs + sample).flatten()
        keys, stops = torch.searchsorted(every, low), torch.searchsorted(every, high)
        itself = ring.causal and number == position
        runs = [Runs(starts, lengths, starts, lengths, causal=True)] if itself else []
        for many in range(int(before.max()) + 1):
            some = (before == many) & (keys < stops)
            if some.any():
                of_keys = keys[some], (stops - keys)[some]
                runs.append(Runs(starts[some], lengths[some], *of_keys, causal=False))
        found.append(runs)
    return found

"""Attention while keys and values go round a ring of ranks (arXiv 2310.01889).

Each rank has its queries all the time and the keys of one rank after another: those of the next are
on their way while it computes with what it has. Backward goes the same way again, and gradients of
keys and values, in fp32 or fp64, go with them until they are back where the keys are from. There a
half of the rank's own is computed meanwhile, so that nothing waits for the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.axes.held import Ranges
from weft.comm.comm import Arriving
from weft.nn.attention_parts import Gradients, Keys, Queries, Sight
from weft.nn.causal_attention import by_head, by_key_head, from_head
from weft.nn.documents import Packed
from weft.nn.moved import moved
from weft.nn.norm import wide_dtype
from weft.parallel.runtime import AxisGroup, Sum


class Ring:
    """Attention of this rank's queries to the keys and values of all ranks."""

    def __init__(self, total: Sum, *, causal: bool) -> None:
        self.causal = causal
        self.group: AxisGroup = total.group
        self.parts: Sequence[Ranges] = total.parts
        """By rank, the places that it has."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed | None) -> Tensor:
        """``q`` and the result ``[batch, own seq, heads, d_head]``, ``k`` and ``v`` likewise."""
        if packed is None or packed.places is None:
            result: Tensor = _Attention.apply(q, k, v, packed, self)  # type: ignore[no-untyped-call]
            return result
        order = tokens_in(packed.places, self.own).argsort(dim=1)
        ascending = (moved(x, order) for x in (q, k, v))
        found = _Attention.apply(*ascending, packed, self)  # type: ignore[no-untyped-call]
        return moved(found, order.argsort(dim=1))

    @property
    def own(self) -> Ranges:
        """The places of this rank."""
        return self.parts[self.group.position]

    @property
    def halves(self) -> list[int]:
        """How many of those are computed together: parts are as long as each other."""
        many = sum(map(len, self.own))
        return [many // 2, many - many // 2]

    def round(self, own: Tensor) -> Iterator[tuple[Ranges, Tensor]]:
        """What every rank has for ``own``, this one's first and then those before it, each with the
        places that rank has. The next is on its way meanwhile."""
        position, size = self.group.position, self.group.size
        held = own
        for step in range(size):
            arriving = None
            if step + 1 < size:
                arriving = self.passed_on(held, position - step - 1)
            yield self.parts[(position - step) % size], held
            if arriving is not None:
                held = arriving()

    def returned(
        self,
        own: Tensor,
        gradient: Callable[[Ranges, Tensor], Tensor],
        rest: Callable[[Tensor], object] | None = None,
    ) -> Tensor:
        """What every rank says is the gradient of this one's ``own``, added up as it goes round
        beside what it is of. This rank's own stays here; ``rest`` adds what was left of it, while
        the sum of the others' is on its way home."""
        found, coming = own, None
        for step, (places, held) in enumerate(self.round(own)):
            of_held = gradient(places, held)
            if not step:
                found = of_held
                continue
            if coming is not None:
                of_held += coming()
            coming = self.passed_on(of_held, self.group.position - step - 1)
        if rest is not None:
            rest(found)
        if coming is not None:
            found += coming()
        return found

    def passed_on(self, x: Tensor, number: int) -> Arriving[Tensor]:
        """Start to give ``x`` ``[batch, seq, ..]`` to the next rank, and to get what is of the
        places of the ``number``-th rank from the one before."""
        position, size = self.group.position, self.group.size
        nothing = x[:, :0]
        parts, sizes = [nothing] * size, [nothing.shape] * size
        seq = sum(map(len, self.parts[number % size]))
        parts[(position + 1) % size] = x.contiguous()
        sizes[(position - 1) % size] = torch.Size((x.shape[0], seq, *x.shape[2:]))
        comm, ranks = self.group.comm, self.group.ranks
        arriving = comm.exchange(parts, sizes, name="keys", group=ranks)
        return lambda: arriving()[(position - 1) % size]


class _Attention(torch.autograd.Function):
    """Kept for backward: this rank's queries, keys, values and result, and logarithms of sums."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, packed: Packed | None, ring: Ring
    ) -> Tensor:
        mine, widths = _queries(q, k, v, ring), [k.shape[3], v.shape[3]]
        seen = _Seen(q, packed, ring)
        for slots, held in ring.round(_held(k, v)):
            sights = seen.of(slots)
            for keys in _keys(seen.parts(slots), held, widths):
                for queries, sight in zip(mine, sights, strict=True):
                    queries.see(keys, sight)
        found = [queries.result() for queries in mine]
        result = torch.cat([_by_token(mixed, len(q)) for mixed, _ in found], dim=1)
        log_sums = (log_sum for _, log_sum in found)
        documents = (None, None) if packed is None else (packed.first, packed.places)
        ctx.save_for_backward(q, k, v, *documents, result, *log_sums)
        ctx.ring = ring
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, first, places, result, *log_sums = ctx.saved_tensors
        ring: Ring = ctx.ring
        batch, kv_heads, wide = len(q), k.shape[2], wide_dtype(q)
        mine, widths = _queries(q, k, v, ring), [k.shape[3], v.shape[3]]
        packed = None if first is None else Packed(first, None, places=places)
        sizes, seen = ring.halves, _Seen(q, packed, ring)
        d_results = [by_key_head(x, kv_heads) for x in torch.split(grad, sizes, dim=1)]
        products = (grad.to(wide) * result).sum(-1, keepdim=True)
        deltas = [by_key_head(x, kv_heads)[..., 0] for x in torch.split(products, sizes, dim=1)]
        d_queries = [torch.zeros_like(queries.q, dtype=wide) for queries in mine]
        each = [*zip(mine, map(Gradients, d_results, log_sums, deltas, d_queries), strict=True)]
        own = _held(k, v)

        def add(some: slice, places: Ranges, held: Tensor, d_held: Tensor) -> Tensor:
            parts, sights = seen.parts(places), seen.of(places)
            of_both = (_keys(parts, x, widths) for x in (held, d_held))
            for keys, d_keys in zip(*of_both, strict=True):
                for (queries, so_far), sight in zip(each[some], sights[some], strict=True):
                    queries.gradients(keys, sight, so_far, d_keys)
            return d_held

        def gradient(places: Ranges, held: Tensor) -> Tensor:
            some = slice(1) if held is own else slice(None)
            return add(some, places, held, torch.zeros_like(held, dtype=wide))

        rest = partial(add, slice(1, None), ring.own, own)
        d_held = ring.returned(own, gradient, rest)
        d_k, d_v = (from_head(x.to(k.dtype), batch) for x in torch.split(d_held, widths, dim=2))
        d_q = torch.cat([_by_token(x.to(q.dtype), batch) for x in d_queries], dim=1)
        return d_q, d_k, d_v, None, None


class _Seen:
    """What the halves of this rank's queries see of the keys of each rank.

    Where tokens are computed in their own places, those are what keys are told by. Else those of a
    rank ascend, so what a query sees of them is again from one number up to another.
    """

    def __init__(self, q: Tensor, packed: Packed | None, ring: Ring) -> None:
        self._places = None if packed is None else packed.places
        if packed is None or packed.places is None:
            sight = Sight.of(q, packed, ring.own, causal=ring.causal)
        else:
            own = tokens_in(packed.places, ring.own).sort(dim=1).values
            sight = Sight.moved(packed, own, causal=ring.causal)
        self._sights = sight.split(ring.halves)

    def parts(self, slots: Ranges) -> Ranges:
        """How the keys of a rank are numbered."""
        if self._places is None:
            return slots
        many = sum(map(len, slots))
        return range(many // 2), range(many // 2, many)

    def of(self, slots: Ranges) -> list[Sight]:
        """By such numbers, of each half."""
        if self._places is None:
            return self._sights
        theirs = tokens_in(self._places, slots).sort(dim=1).values
        return [sight.among(theirs) for sight in self._sights]


def tokens_in(places: Tensor, slots: Ranges) -> Tensor:
    """Which tokens ``[batch, n]`` of each sample a rank has in its slots."""
    return torch.cat([places[:, part.start : part.stop] for part in slots], dim=1)


def _queries(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> list[Queries]:
    """This rank's, a half each."""
    return [
        Queries(by_key_head(mine, k.shape[2]), v.shape[3])
        for mine in torch.split(q, ring.halves, dim=1)
    ]


def _held(k: Tensor, v: Tensor) -> Tensor:
    """``[batch, seq, kv_heads, width]`` each, as they travel: ``[batch * kv_heads, seq, both
    widths]``."""
    return torch.cat((by_head(k), by_head(v)), dim=2)


def _keys(places: Ranges, held: Tensor, widths: list[int]) -> Iterator[Keys]:
    """Of a rank, a part each."""
    for part, both in zip(places, torch.split(held, [len(p) for p in places], 1), strict=True):
        yield Keys(part, *torch.split(both, widths, dim=2))


def _by_token(x: Tensor, batch: int) -> Tensor:
    """``[n, group, seq, d_head]`` to ``[batch, seq, heads, d_head]``."""
    return from_head(x.flatten(0, 1), batch)

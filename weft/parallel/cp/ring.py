"""Attention while keys and values go round a ring of ranks (arXiv 2310.01889).

Each rank has its queries all the time and the keys of one rank after another: those of the next are
on their way while it computes with what it has. Backward goes the same way again, and gradients of
keys and values, in fp32 or fp64, go with them until they are back where the keys are from. There a
half of the rank's own is computed meanwhile, so that nothing waits for the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

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
from weft.parallel.cp.gathered import tokens_in
from weft.parallel.runtime import AxisGroup, Sum
from weft.platform.upload import upload


class Travel(NamedTuple):
    """What of the keys goes round. Where that is nothing at all, nobody sends."""

    many: Sequence[int]
    """By rank, of the tokens that it has."""
    own: Tensor | None
    """Which of this rank's, by number; None: all."""

    def of(self, x: Tensor) -> Tensor:
        """Those of ``x`` ``[batch, own seq, ..]``."""
        return x if self.own is None else x.index_select(1, self.own)

    def add(self, total: Tensor, x: Tensor) -> None:
        """Add what is of those to ``total`` ``[batch, own seq, ..]``."""
        total.add_(x) if self.own is None else total.index_add_(1, self.own, x)

    def on(self, device: torch.device) -> Travel:
        """The same for tensors there."""
        return self if self.own is None else Travel(self.many, upload(self.own, device))


class Ring:
    """Attention of this rank's queries to the keys and values of all ranks."""

    def __init__(self, total: Sum, *, causal: bool) -> None:
        self.causal = causal
        self.group: AxisGroup = total.group
        self.parts: Sequence[Ranges] = total.parts
        """By rank, the places that it has."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed | None) -> Tensor:
        """``q`` and the result ``[batch, own seq, heads, d_head]``, ``k`` and ``v`` likewise."""
        attend = partial(_Attention.apply, packed, self)
        return self.ascending(attend, (q, k, v), packed)

    def ascending(
        self, attend: Callable[..., Tensor], inputs: Sequence[Tensor], packed: Packed | None
    ) -> Tensor:
        """Attention that knows a rank's tokens in the order of their samples alone."""
        if packed is None or packed.places is None:
            return attend(*inputs)
        order = tokens_in(packed.places, self.own).argsort(dim=1)
        return moved(attend(*(moved(x, order) for x in inputs)), order.argsort(dim=1))

    @property
    def own(self) -> Ranges:
        """The places of this rank."""
        return self.parts[self.group.position]

    @property
    def halves(self) -> list[int]:
        """How many of those are computed together: parts are as long as each other."""
        many = sum(map(len, self.own))
        return [many // 2, many - many // 2]

    @property
    def all(self) -> Travel:
        """All that ranks have."""
        return Travel([sum(map(len, places)) for places in self.parts], None)

    def round(self, own: Tensor, travel: Travel) -> Iterator[tuple[int, Tensor]]:
        """``own``, and then what travels of it on every other rank, those before this one first,
        each with the number of its rank. The next is on its way meanwhile."""
        position, size = self.group.position, self.group.size
        held, steps = own, size if any(travel.many) else 1
        for step in range(steps):
            arriving = None
            if step + 1 < steps:
                going = held if step else travel.of(own)
                arriving = self.passed_on(going, travel.many[(position - step - 1) % size])
            yield (position - step) % size, held
            if arriving is not None:
                held = arriving()

    def returned(
        self,
        own: Tensor,
        travel: Travel,
        gradient: Callable[[int, Tensor], Tensor],
        rest: Callable[[Tensor], object] | None = None,
    ) -> Tensor:
        """What every rank says is the gradient of this one's ``own``, added up as it goes round
        beside what it is of. This rank's own stays here; ``rest`` adds what was left of it, while
        the sum of the others' is on its way home."""
        position, size = self.group.position, self.group.size
        found, coming = own, None
        for step, (number, held) in enumerate(self.round(own, travel)):
            of_held = gradient(number, held)
            if not step:
                found = of_held
                continue
            if coming is not None:
                of_held += coming()
            coming = self.passed_on(of_held, travel.many[(position - step - 1) % size])
        if rest is not None:
            rest(found)
        if coming is not None:
            travel.add(found, coming())
        return found

    def passed_on(self, x: Tensor, many: int) -> Arriving[Tensor]:
        """Start to give ``x`` ``[batch, seq, ..]`` to the next rank, and to get so many tokens from
        the one before."""
        position, size = self.group.position, self.group.size
        nothing = x[:, :0]
        parts, sizes = [nothing] * size, [nothing.shape] * size
        parts[(position + 1) % size] = x.contiguous()
        sizes[(position - 1) % size] = torch.Size((x.shape[0], many, *x.shape[2:]))
        comm, ranks = self.group.comm, self.group.ranks
        arriving = comm.exchange(parts, sizes, name="keys", group=ranks)
        return lambda: arriving()[(position - 1) % size]


class _Attention(torch.autograd.Function):
    """Kept for backward: this rank's queries, keys, values and result, and logarithms of sums."""

    @staticmethod
    def forward(
        ctx: Any, packed: Packed | None, ring: Ring, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        mine, widths = _queries(q, k, v, ring), [k.shape[3], v.shape[3]]
        seen = _Seen(q, packed, ring)
        for number, held in ring.round(_held(k, v), seen.travel):
            places, sights = seen.of(number)
            for keys in _keys(places, held, widths):
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
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, Tensor, Tensor]:
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

        def add(some: slice, number: int, held: Tensor, d_held: Tensor) -> Tensor:
            places, sights = seen.of(number)
            of_both = (_keys(places, x, widths) for x in (held, d_held))
            for keys, d_keys in zip(*of_both, strict=True):
                for (queries, so_far), sight in zip(each[some], sights[some], strict=True):
                    queries.gradients(keys, sight, so_far, d_keys)
            return d_held

        def gradient(number: int, held: Tensor) -> Tensor:
            some = slice(1) if held is own else slice(None)
            return add(some, number, held, torch.zeros_like(held, dtype=wide))

        rest = partial(add, slice(1, None), ring.group.position, own)
        d_held = ring.returned(own, seen.travel, gradient, rest)
        d_k, d_v = (from_head(x.to(k.dtype), batch) for x in torch.split(d_held, widths, dim=2))
        d_q = torch.cat([_by_token(x.to(q.dtype), batch) for x in d_queries], dim=1)
        return None, None, d_q, d_k, d_v


class _Seen:
    """What the halves of this rank's queries see of the keys of each rank, and what of these goes
    round: with documents that is what other ranks' queries see.

    Then keys are numbered among those that are there. Tokens of a rank ascend, so what a query sees
    of them is again from one number up to another.
    """

    def __init__(self, q: Tensor, packed: Packed | None, ring: Ring) -> None:
        self._places, self._tokens = ring.parts, list[Tensor]()
        if packed is None:
            sight, self.travel = Sight.of(q, None, ring.own, causal=ring.causal), ring.all
        else:
            of_ranks = by_rank(packed, ring.parts)
            self.travel, self._tokens = going_round(packed, of_ranks, ring)
            own = of_ranks[ring.group.position]
            sight = Sight.moved(packed, own, causal=ring.causal)
        self._sights = sight.split(ring.halves)

    def of(self, number: int) -> tuple[Ranges, list[Sight]]:
        """How the keys of a rank are numbered, part by part, and what each half sees of them."""
        if not self._tokens:
            return self._places[number], self._sights
        theirs = self._tokens[number]
        return (range(theirs.shape[1]),), [sight.among(theirs) for sight in self._sights]


def by_rank(packed: Packed, parts: Sequence[Ranges]) -> list[Tensor]:
    """Which tokens ``[batch, n]`` of each sample ranks have, ascending."""
    places = packed.places
    if places is None:
        places = torch.arange(packed.first.shape[1]).expand_as(packed.first)
    return [tokens_in(places, slots).sort(dim=1).values for slots in parts]


def going_round(
    packed: Packed, of_ranks: Sequence[Tensor], ring: Ring
) -> tuple[Travel, list[Tensor]]:
    """What of the keys, and by rank the tokens ``[batch, n]`` whose keys are there then."""
    rows = _seen_by_others(packed, of_ranks, causal=ring.causal)
    own = of_ranks[ring.group.position]
    there = [x if x is own else x[:, some] for x, some in zip(of_ranks, rows, strict=True)]
    return Travel([*map(len, rows)], rows[ring.group.position]), there


def _seen_by_others(packed: Packed, of_ranks: Sequence[Tensor], *, causal: bool) -> list[Tensor]:
    """By rank, which of its tokens, by number, queries of other ranks see in some sample."""
    owner = torch.empty_like(packed.first)
    for number, tokens in enumerate(of_ranks):
        owner.scatter_(1, tokens, number)
    run = torch.zeros_like(owner)
    run[:, 1:] = (owner[:, 1:] != owner[:, :-1]).cumsum(1)  # of tokens that one rank has
    seen = torch.searchsorted(run, run, right=True) < packed.ends
    if not causal:
        seen |= torch.searchsorted(run, run) > packed.first
    return [seen.gather(1, tokens).any(0).nonzero()[:, 0] for tokens in of_ranks]


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

"""Tokens on their way to the ranks that have their experts, and back.

All to all at once, or first among neighbours, to the one of them at the place where the expert is
in its group, and then among the ranks at that place of each group (arXiv 2205.10034, 2206.03382):
each rank sends one message to each other group, with what all of its neighbours have for it. How
many tokens come is said ahead in the same way. Whatever the way, an expert gets its tokens in the
order of the ranks that they come from, so results are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.nn.experts.grouped import Visit
from weft.parallel.division import there_and_back
from weft.parallel.runtime import Sum

COUNTS, TOKENS = "expert counts", "experts"
"""Names of the messages."""


class _Leg(NamedTuple):
    """An exchange among some ranks of blocks of tokens, one for each source and expert."""

    ranks: tuple[int, ...]
    experts: Sequence[Tensor]
    """By rank, the experts whose tokens go to it, by their places among those of the leg before."""
    order: Tensor
    """Of the blocks, as they lie by source and expert: by rank, and then as they were."""


class _Hop(NamedTuple):
    """A leg of one trip: what is sent in which order, how much to each rank, how much comes."""

    ranks: tuple[int, ...]
    places: Tensor
    given: list[int]
    taken: list[int]


class Exchange:
    """Where tokens' choices are computed: ``Experts.visit`` of ranks with some experts each."""

    def __init__(self, total: Sum) -> None:
        group = total.group
        self._comm: Comm = group.comm
        experts = [_places(held) for held in total.parts]
        near = group.near_ways
        if near in (1, group.size):
            self._legs = [self._leg(group.ranks, experts, sources=1)]
        else:
            at_place = [experts[place::near] for place in range(near)]
            passing = at_place[group.near.position]
            ends = accumulate(map(len, passing), initial=0)
            each = [range(*both) for both in pairwise(ends)]
            first = [_places(rest) for rest in at_place]
            self._legs = [
                self._leg(group.near.ranks, first, sources=1),
                self._leg(group.far.ranks, each, sources=near),
            ]
        own = len(experts[group.position])
        by_expert = [source * own + n for n in range(own) for source in range(group.size)]
        self._last = torch.tensor(by_expert, device=self._comm.device)

    def __call__(self, ends: Tensor) -> Visit:
        """Of the choices of this rank's tokens, by expert."""
        if torch.compiler.is_compiling():
            from weft.parallel.ep import uncompiled

            visit: Visit = uncompiled.visit(self, ends)
            return visit
        return self.visit(ends)

    def visit(self, ends: Tensor) -> Visit:
        """Collective, whatever the tokens of a rank choose."""
        counts = torch.diff(ends, prepend=ends.new_zeros(1))[None].long()  # [sources, experts]
        hops = []
        for leg in self._legs:
            parts = [counts[:, experts] for experts in leg.experts]
            sizes = [parts[leg.ranks.index(self._comm.rank)].shape] * len(parts)
            found = self._comm.exchange(parts, sizes, name=COUNTS, group=leg.ranks)()
            sums = torch.stack([each.sum() for each in (*parts, *found)]).tolist()
            given, taken = sums[: len(parts)], sums[len(parts) :]
            hops.append(_Hop(leg.ranks, _gathered(counts, leg.order, sum(given)), given, taken))
            counts = torch.cat(found)
        trip = _Trip(self._comm, hops, _gathered(counts, self._last, sum(hops[-1].taken)))
        ends = counts.sum(0).cumsum(0).to(torch.int32)
        return Visit(ends, trip.there_by_expert, trip.back_by_choice)

    def _leg(
        self, ranks: tuple[int, ...], experts: Sequence[Sequence[int]], *, sources: int
    ) -> _Leg:
        """``sources``: ranks whose tokens are here before."""
        device, every = self._comm.device, sum(map(len, experts))
        order = [row * every + n for each in experts for row in range(sources) for n in each]
        places = [torch.tensor(each, device=device) for each in experts]
        return _Leg(ranks, places, torch.tensor(order, device=device))


class _Trip:
    """The way of one layer's tokens, there and back, each the transpose of the other."""

    def __init__(self, comm: Comm, hops: Sequence[_Hop], places: Tensor) -> None:
        self._comm, self._hops, self._places = comm, hops, places

    def there_by_expert(self, x: Tensor) -> Tensor:
        """Shard of tokens -> Shard of experts."""
        return there_and_back(x, self._there, self._back)

    def back_by_choice(self, x: Tensor) -> Tensor:
        """Shard of experts -> Shard of tokens."""
        return there_and_back(x, self._back, self._there)

    def _there(self, x: Tensor) -> Tensor:
        for hop in self._hops:
            x = self._sent(x[hop.places], hop.ranks, hop.given, hop.taken)
        return x[self._places]

    def _back(self, x: Tensor) -> Tensor:
        x = torch.empty_like(x).index_copy_(0, self._places, x)
        for hop in reversed(self._hops):
            x = self._sent(x, hop.ranks, hop.taken, hop.given)
            x = torch.empty_like(x).index_copy_(0, hop.places, x)
        return x

    def _sent(
        self, x: Tensor, ranks: tuple[int, ...], given: Sequence[int], taken: Sequence[int]
    ) -> Tensor:
        sizes = [(many, *x.shape[1:]) for many in taken]
        parts = torch.split(x, list(given))
        return torch.cat(self._comm.exchange(parts, sizes, name=TOKENS, group=ranks)())


def _places(parts: Iterable[Iterable[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def _gathered(counts: Tensor, order: Tensor, total: int) -> Tensor:
    """Where rows are, of blocks of ``counts`` rows one after the other, that are to lie in another
    order of blocks: ``[total]``."""
    before = counts.flatten()
    after = before[order]
    moved = _starts(before)[order] - _starts(after)
    places = torch.arange(total, device=counts.device)
    return places + torch.repeat_interleave(moved, after, output_size=total)


def _starts(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0) - sizes

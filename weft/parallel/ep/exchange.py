"""Tokens on their way to the ranks that have their experts, and back.

All to all at once, or first among neighbours, to the one of them at the place where the expert is
in its group, and then among the ranks at that place of each group (arXiv 2205.10034, 2206.03382):
each rank sends one message to each other group, with what all of its neighbours have for it. How
many tokens come is said ahead in the same way. Whatever the way, an expert gets its tokens in the
order of the ranks that they come from, so results are the same bit for bit.

The last step of each way goes beside what is computed next; those before it are short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from weft.comm.comm import Arriving, Comm
from weft.nn.experts.grouped import Visit
from weft.parallel import trips
from weft.parallel.casts import Code
from weft.parallel.runtime import Sum
from weft.precision.casts import CASTS

COUNTS, TOKENS = "expert counts", "experts"
"""Names of the messages."""


class _Leg(NamedTuple):
    """An exchange among some ranks of blocks of tokens, one for each source and expert."""

    ranks: tuple[int, ...]
    experts: Sequence[Tensor]
    """By rank, the experts whose tokens go to it, by their places among those of the leg before."""
    order: Tensor
    """Of the blocks, as they lie by source and expert: by rank, and then as they were."""
    codes: tuple[Code, Code] | None
    """How activations and gradients travel; None: as they are."""


class _Hop(NamedTuple):
    """A leg of one trip: what is sent in which order, how much to each rank, how much comes."""

    ranks: tuple[int, ...]
    places: Tensor
    given: list[int]
    taken: list[int]
    codes: tuple[Code, Code] | None


class _Copies(NamedTuple):
    """Of experts that several ranks have, one after the other by expert."""

    experts: Tensor
    """``[copies]``: of which expert each is one."""
    used: Tensor
    """``[copies]`` bool: this rank's tokens go to it."""


class Exchange:
    """Where tokens' choices are computed: ``Experts.visits`` of ranks with some experts each."""

    def __init__(self, total: Sum) -> None:
        group = total.group
        self._comm: Comm = group.comm
        self._group = group
        experts = self._told_apart([_places(held) for held in total.parts])
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

    def __call__(self, ends: Sequence[Tensor]) -> list[Visit]:
        """Of the choices of this rank's tokens, by expert, piece by piece."""
        if torch.compiler.is_compiling():
            from weft.parallel.ep import uncompiled

            visits: list[Visit] = uncompiled.visits(self, ends)
            return visits
        return self.visits(ends, (trips.begin, trips.end))

    def visits(self, ends: Sequence[Tensor], ways: trips.Ways) -> list[Visit]:
        """Collective, whatever the tokens of a rank choose."""
        sizes = [torch.diff(each, prepend=each.new_zeros(1)) for each in ends]
        counts = torch.stack(sizes)[:, None].long()  # [pieces, sources, experts]
        if self._copies is not None:
            counts = counts[..., self._copies.experts] * self._copies.used
        hops: list[list[_Hop]] = [[] for _ in ends]
        for leg in self._legs:
            parts = [counts[..., experts] for experts in leg.experts]
            come = [parts[leg.ranks.index(self._comm.rank)].shape] * len(parts)
            found = self._comm.exchange(parts, come, name=COUNTS, group=leg.ranks)()
            sums = torch.stack([each.sum((1, 2)) for each in (*parts, *found)], 1).tolist()
            for piece, both in enumerate(sums):
                given, taken = both[: len(parts)], both[len(parts) :]
                places = _gathered(counts[piece], leg.order, sum(given))
                hops[piece].append(_Hop(leg.ranks, places, given, taken, leg.codes))
            counts = torch.cat(found, 1)
        return [self._visit(*both, ways) for both in zip(counts, hops, strict=True)]

    def _told_apart(self, experts: list[list[int]]) -> list[list[int]]:
        """By rank its experts, where several have the same one numbered as if they were others:
        a rank's tokens go to its own copy, else to the same of the others always."""
        held = sorted((expert, rank) for rank, own in enumerate(experts) for expert in own)
        self._copies: _Copies | None = None
        if len({expert for expert, _ in held}) == len(held):
            return experts
        takers = [_taker(experts, each, self._group.position) for each, _ in held]
        used = [taker == rank for taker, (_, rank) in zip(takers, held, strict=True)]
        device = self._comm.device
        of = torch.tensor([expert for expert, _ in held], device=device)
        self._copies = _Copies(of, torch.tensor(used, device=device))
        number = {each: n for n, each in enumerate(held)}
        return [[number[expert, rank] for expert in own] for rank, own in enumerate(experts)]

    def _visit(self, counts: Tensor, hops: Sequence[_Hop], ways: trips.Ways) -> Visit:
        """``counts``: ``[sources, own experts]``."""
        trip = _Trip(self._comm, hops, _gathered(counts, self._last, sum(hops[-1].taken)))
        ends = counts.sum(0).cumsum(0).to(torch.int32)
        there = trip.there, partial(trip.back, is_gradient=True)
        back = trip.back, partial(trip.there, is_gradient=True)
        return Visit(ends, *(partial(_started, path=path, ways=ways) for path in (there, back)))

    def _leg(
        self, ranks: tuple[int, ...], experts: Sequence[Sequence[int]], *, sources: int
    ) -> _Leg:
        """``sources``: ranks whose tokens are here before."""
        device, every = self._comm.device, sum(map(len, experts))
        order = [row * every + n for each in experts for row in range(sources) for n in each]
        places = [torch.tensor(each, dtype=torch.int64, device=device) for each in experts]
        return _Leg(ranks, places, torch.tensor(order, device=device), self._codes(ranks))

    def _codes(self, ranks: tuple[int, ...]) -> tuple[Code, Code] | None:
        group = self._group
        nodes = {self._comm.members[rank].node for rank in ranks} if group.cast_between else ()
        if not group.cast or (group.cast_between and len(nodes) < 2):
            return None
        cast = CASTS[group.cast]
        dtypes = (vars(torch)[name] for name in (cast.factors, cast.gradients))
        factors, gradients = (Code(dtype, has_scales=cast.row_bytes > 0) for dtype in dtypes)
        return factors, gradients


class _Trip:
    """The way of tokens there and back, each the transpose of the other."""

    def __init__(self, comm: Comm, hops: Sequence[_Hop], places: Tensor) -> None:
        self._comm, self._hops, self._places = comm, hops, places

    def there(self, x: Tensor, *, is_gradient: bool = False) -> Arriving[Tensor]:
        """Shard of tokens -> Shard of experts."""
        *before, last = self._hops
        for hop in before:
            x = self._sent(x[hop.places], hop, is_gradient=is_gradient)()
        coming = self._sent(x[last.places], last, is_gradient=is_gradient)
        return lambda: coming()[self._places]

    def back(self, x: Tensor, *, is_gradient: bool = False) -> Arriving[Tensor]:
        """Shard of experts -> Shard of tokens."""
        *after, first = self._hops
        x = _in_places(x, self._places)
        coming = self._sent(x, first, returns=True, is_gradient=is_gradient)

        def arrived() -> Tensor:
            x = _in_places(coming(), first.places)
            for hop in reversed(after):
                x = self._sent(x, hop, returns=True, is_gradient=is_gradient)()
                x = _in_places(x, hop.places)
            return x

        return arrived

    def _sent(
        self, x: Tensor, hop: _Hop, *, is_gradient: bool, returns: bool = False
    ) -> Arriving[Tensor]:
        """What comes over a hop for rows by rank, ``[rows, d_model]``."""
        given, taken = (hop.taken, hop.given) if returns else (hop.given, hop.taken)
        code = hop.codes[is_gradient] if hop.codes else Code(x.dtype)
        message = x
        if hop.codes:
            message = x.new_empty(code.size(tuple(x.shape)), dtype=code.dtype)
            code.encode(x, message)
        sizes = [(many, *message.shape[1:]) for many in taken]
        parts = torch.split(message, given)
        coming = self._comm.exchange(parts, sizes, name=TOKENS, group=hop.ranks)

        def arrived() -> Tensor:
            came = torch.cat(coming())
            if not hop.codes:
                return came
            rows = x.new_empty(len(came), *x.shape[1:])
            code.decode(came, rows)
            return rows

        return arrived


def _started(x: Tensor, path: trips.Path, ways: trips.Ways) -> Callable[[], Tensor]:
    begin, end = ways
    return partial(end, begin(x, path))


def _taker(experts: Sequence[Sequence[int]], expert: int, source: int) -> int:
    """Which of the ranks that have an expert gets a rank's tokens: itself, else each of them those
    of as many others."""
    having = [rank for rank, own in enumerate(experts) if expert in own]
    if source in having:
        return source
    others = [rank for rank in range(len(experts)) if rank not in having]
    return having[others.index(source) % len(having)]


def _places(parts: Iterable[Iterable[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def _in_places(x: Tensor, places: Tensor) -> Tensor:
    return torch.empty_like(x).index_copy_(0, places, x)


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

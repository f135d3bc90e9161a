"""A dimension of activations divided along an axis: made whole, and divided again, each with its
backward."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from weft.comm.comm import Arriving
from weft.parallel.pair import Pair
from weft.parallel.runtime import AxisGroup, Change, Changes, Lying
from weft.plan.layout import Partial, Replicate, Shard

Names = tuple[str, str]
"""Of the messages that make a tensor whole and of those that add up its parts."""
SEQ: Names = ("gather seq", "scatter seq")


class Division:
    """One dimension of a tensor divided along an axis: whole on each rank, or a part.

    Compiled blocks stop before a collective and go on after it: it counts, and talks to others.
    """

    def __init__(self, group: AxisGroup, lying: Lying, names: Names = SEQ) -> None:
        assert isinstance(lying.placement, Shard), f"not divided: {lying}"
        self._group = group
        self._names = names
        self._dim = lying.placement.dim
        self._parts = lying.parts
        self._order = _places(lying)
        """Places of the elements in the whole, rank by rank, where they are not consecutive."""
        start = sum(self._parts[: group.position])
        self._own = slice(start, start + self._parts[group.position])

    def gather(self, x: Tensor) -> Tensor:
        """Shard -> Replicate. Backward: Partial -> Shard."""
        return there_and_back(x, self.gathered, self.scattered)

    def scatter_sum(self, x: Tensor) -> Tensor:
        """Partial -> Shard. Backward: Shard -> Replicate."""
        return there_and_back(x, self.scattered, self.gathered)

    def own_part(self, x: Tensor) -> Tensor:
        """Replicate -> Shard. Backward: Shard -> Partial."""
        return there_and_back(x, self.taken, self.padded) if x.requires_grad else self.taken(x)

    def gathered(self, x: Tensor) -> Tensor:
        """Every rank's part, in order."""
        return self.gathering(x)()

    def scattered(self, x: Tensor) -> Tensor:
        """The sum over ranks of this rank's part, in rank order where the backend has no own."""
        return self.scattering(x)()

    def gathering(self, x: Tensor) -> Arriving[Tensor]:
        """Start to gather; the result waits."""
        before, after = x.shape[: self._dim], x.shape[self._dim + 1 :]
        sizes = [(*before, part, *after) for part in self._parts]
        comm, ranks = self._group.comm, self._group.ranks
        own = x.contiguous()
        arriving = comm.gather_parts(own, sizes, name=self._names[0], group=ranks)
        return partial(self._joined, arriving, own)

    def scattering(self, x: Tensor) -> Arriving[Tensor]:
        """Start to sum; the result waits."""
        comm, ranks = self._group.comm, self._group.ranks
        parts = torch.split(self.by_rank(x), list(self._parts), dim=self._dim)
        return comm.reduce_scatter_parts(parts, name=self._names[1], group=ranks)

    def taken(self, x: Tensor) -> Tensor:
        """This rank's part of the whole."""
        return self.by_rank(x)[(slice(None),) * self._dim + (self._own,)]

    def padded(self, x: Tensor) -> Tensor:
        """This rank's part as a term of the whole."""
        size = (*x.shape[: self._dim], sum(self._parts), *x.shape[self._dim + 1 :])
        places = torch.arange(size[self._dim]) if self._order is None else self._order
        own = places[self._own].to(x.device)
        return x.new_zeros(size).index_copy_(self._dim, own, x)

    def _joined(self, arriving: Arriving[list[Tensor]], _own: Tensor) -> Tensor:
        """The parts that arrive as one. Nobody lets go of what this rank gives before."""
        return self.in_order(torch.cat(arriving(), dim=self._dim))

    def by_rank(self, x: Tensor) -> Tensor:
        """The whole, every rank's part after the other."""
        return x if self._order is None else x.index_select(self._dim, self._order.to(x.device))

    def in_order(self, x: Tensor) -> Tensor:
        """The whole, of every rank's part after the other."""
        if self._order is None:
            return x
        return torch.empty_like(x).index_copy_(self._dim, self._order.to(x.device), x)


def _places(lying: Lying) -> Tensor | None:
    """Of all elements, rank by rank; None where they follow one another."""
    ranges = [part for ranges in lying.held for part in ranges if part]
    if all(a.stop == b.start for a, b in pairwise([range(0), *ranges])):
        return None
    places = [place for part in ranges for place in part]
    assert sorted(places) == list(range(len(places))), f"parts have some in common: {lying}"
    return torch.tensor(places)


def there_and_back(x: Tensor, there: Change, back: Change) -> Tensor:
    """``there(x)``, and ``back`` of its gradient. Compiled blocks go on after it."""
    if torch.compiler.is_compiling():
        from weft.parallel.uncompiled import pair

        result: Tensor = pair(x, there, back)
    else:
        result = Pair.apply(x, there, back)  # type: ignore[no-untyped-call]
    return result


CHANGES: Changes = {
    (Shard, Replicate): lambda group, before, _: Division(group, before).gather,
    (Partial, Shard): lambda group, _, after: Division(group, after).scatter_sum,
    (Replicate, Shard): lambda group, _, after: Division(group, after).own_part,
}
"""Of an axis that divides hidden states between modules and puts them together inside."""

"""How activations change along the tensor-parallel axis, each change with its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.parallel.runtime import AxisGroup, Change, Changes, Lying
from weft.parallel.tensor.pair import Pair
from weft.plan.layout import Partial, Replicate, Shard


class Division:
    """One dimension of a tensor divided along an axis: whole on each rank, or a part.

    Compiled blocks stop before a collective and go on after it: it counts, and talks to others.
    """

    def __init__(self, group: AxisGroup, lying: Lying) -> None:
        assert isinstance(lying.placement, Shard), f"not divided: {lying}"
        self._group = group
        self._dim = lying.placement.dim
        self._parts = lying.parts
        start = sum(self._parts[: group.position])
        self._own = slice(start, start + self._parts[group.position])

    def gather(self, x: Tensor) -> Tensor:
        """Shard -> Replicate. Backward: Partial -> Shard."""
        return _pair(x, self.gathered, self.scattered)

    def scatter_sum(self, x: Tensor) -> Tensor:
        """Partial -> Shard. Backward: Shard -> Replicate."""
        return _pair(x, self.scattered, self.gathered)

    def own_part(self, x: Tensor) -> Tensor:
        """Replicate -> Shard, of what needs no gradient: places of tokens, say."""
        assert not x.requires_grad, "a gradient would have to be gathered"
        return x[(slice(None),) * self._dim + (self._own,)]

    def gathered(self, x: Tensor) -> Tensor:
        """Every rank's part, in order."""
        before, after = x.shape[: self._dim], x.shape[self._dim + 1 :]
        sizes = [(*before, part, *after) for part in self._parts]
        comm, ranks = self._group.comm, self._group.ranks
        arriving = comm.gather_parts(x.contiguous(), sizes, name="gather seq", group=ranks)
        return torch.cat(arriving(), dim=self._dim)

    def scattered(self, x: Tensor) -> Tensor:
        """The sum over ranks of this rank's part, in rank order where the backend has no own."""
        comm, ranks = self._group.comm, self._group.ranks
        parts = torch.split(x, list(self._parts), dim=self._dim)
        return comm.reduce_scatter_parts(parts, name="scatter seq", group=ranks)()


def _pair(x: Tensor, there: Change, back: Change) -> Tensor:
    if torch.compiler.is_compiling():
        from weft.parallel.tensor.uncompiled import pair

        result: Tensor = pair(x, there, back)
    else:
        result = Pair.apply(x, there, back)  # type: ignore[no-untyped-call]
    return result


CHANGES: Changes = {
    (Shard, Replicate): lambda group, before, _: Division(group, before).gather,
    (Partial, Shard): lambda group, _, after: Division(group, after).scatter_sum,
    (Replicate, Shard): lambda group, _, after: Division(group, after).own_part,
}

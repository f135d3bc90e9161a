"""Features that a layer gives on several ranks, of whose gradient each has a term.

Where tensor parallelism lets ranks compute the same of a layer (keys of few heads, a router, what
leads to a low rank), each goes on with a part of what depends on it. Terms may be added up after a
product, not after rounding: so they are before it, and then one rank alone has the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.parallel.params import Held, LocalParam
from weft.parallel.runtime import AxisGroup
from weft.plan.tiling import Stored


@dataclass(frozen=True, slots=True)
class Repeated:
    """Of one layer, among the ranks of a group that have the same tokens."""

    group: AxisGroup
    width: int
    """Features of all ranks together."""
    rows: tuple[tuple[slice, slice, bool], ...]
    """Here, among all, and whether this rank is the one to have the sum."""

    def summed(self, grad: Tensor) -> Tensor:
        """``[.., own features]`` to as much: the sum of all ranks' terms, or zeros where another
        rank has it."""
        whole = grad.new_zeros(*grad.shape[:-1], self.width)
        for here, there, _ in self.rows:
            whole[..., there] = grad[..., here]
        self.group.comm.all_reduce(whole, name="repeated gradients", group=self.group.ranks)
        found = torch.zeros_like(grad, memory_format=torch.contiguous_format)
        for here, there, is_here in self.rows:
            if is_here:
                found[..., here] = whole[..., there]
        return found


def repeated(
    param: LocalParam, pieces: Sequence[Held], groups: Sequence[AxisGroup]
) -> Repeated | None:
    """Of a layer with such a weight ``[d_out, d_in]``; None where no two ranks give the same.

    ``pieces``: boxes of it that the same ranks hold throughout.
    """
    for group in groups:
        if any(len({*group.ranks} & {*piece.ranks}) > 1 for piece in pieces):
            rows = tuple(_rows(param.stored, pieces, group))
            return Repeated(group, param.spec.shape[0], rows)
    return None


def _rows(
    stored: Stored, pieces: Sequence[Held], group: AxisGroup
) -> Iterator[tuple[slice, slice, bool]]:
    own, done = group.comm.rank, set[int]()
    for piece in pieces:
        first, size = piece.box.offset[0], piece.box.size[0]
        if own in piece.ranks and first not in done:  # not once more for other columns
            done.add(first)
            here = stored.slices(piece.box)[0]
            holder = min(rank for rank in group.ranks if rank in piece.ranks)
            yield here, slice(first, first + size), holder == own

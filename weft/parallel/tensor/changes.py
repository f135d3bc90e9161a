"""How activations change along the tensor-parallel axis, each change with its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.parallel.runtime import AxisGroup, Change, Changes, Lying
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
        result: Tensor = _gather(x, self)
        return result

    def scatter_sum(self, x: Tensor) -> Tensor:
        """Partial -> Shard. Backward: Shard -> Replicate."""
        result: Tensor = _scatter_sum(x, self)
        return result

    def own_part(self, x: Tensor) -> Tensor:
        """Replicate -> Shard, of what needs no gradient: places of tokens, say."""
        assert not x.requires_grad, "a gradient would have to be gathered"
        return x[(slice(None),) * self._dim + (self._own,)]

    def gathered(self, x: Tensor) -> Tensor:
        """Every rank's part, in order."""
        sizes = [_resized(x.shape, self._dim, part) for part in self._parts]
        comm, ranks = self._group.comm, self._group.ranks
        arriving = comm.gather_parts(x.contiguous(), sizes, name="gather seq", group=ranks)
        return torch.cat(arriving(), dim=self._dim)

    def scattered(self, x: Tensor) -> Tensor:
        """The sum over ranks of this rank's part, in rank order where the backend has no own."""
        comm, ranks = self._group.comm, self._group.ranks
        parts = torch.split(x, list(self._parts), dim=self._dim)
        return comm.reduce_scatter_parts(parts, name="scatter seq", group=ranks)()


def _resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, division: Division) -> Tensor:
        ctx.division = division
        return division.gathered(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.division.scattered(grad), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, division: Division) -> Tensor:
        ctx.division = division
        return division.scattered(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.division.gathered(grad.contiguous()), None


_gather = torch.compiler.disable(_Gather.apply)  # type: ignore[no-untyped-call]
_scatter_sum = torch.compiler.disable(_ScatterSum.apply)  # type: ignore[no-untyped-call]


def _gathering(group: AxisGroup, before: Lying, _after: Lying) -> Change:
    return Division(group, before).gather


def _scattering(group: AxisGroup, _before: Lying, after: Lying) -> Change:
    return Division(group, after).scatter_sum


def _taking(group: AxisGroup, _before: Lying, after: Lying) -> Change:
    return Division(group, after).own_part


CHANGES: Changes = {
    (Shard, Replicate): _gathering,
    (Partial, Shard): _scattering,
    (Replicate, Shard): _taking,
}

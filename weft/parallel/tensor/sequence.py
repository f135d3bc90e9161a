"""Activations between a sharded and a whole sequence, each with its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.comm.comm import Comm
from weft.plan.tiling import split_evenly

DIM = 1
"""``[batch, seq, d_model]``."""


class TensorGroup:
    """The tensor-parallel ranks of one stage around this rank.

    Compiled blocks stop before a collective and go on after it: it counts, and talks to others.
    """

    def __init__(self, comm: Comm, ranks: tuple[int, ...], seq_len: int) -> None:
        self.comm = comm
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(comm.rank)
        self.seq_parts = split_evenly(seq_len, self.size)
        """Tokens of every sample that each rank holds between modules."""

    @property
    def own(self) -> slice:
        """This rank's part of the sequence."""
        start = sum(self.seq_parts[: self.rank])
        return slice(start, start + self.seq_parts[self.rank])

    def gather(self, x: Tensor) -> Tensor:
        """Shard(1) -> Replicate. Backward: Partial -> Shard(1)."""
        result: Tensor = _gather(x, self)
        return result

    def scatter_sum(self, x: Tensor) -> Tensor:
        """Partial -> Shard(1). Backward: Shard(1) -> Replicate."""
        result: Tensor = _scatter_sum(x, self)
        return result

    def gathered(self, x: Tensor) -> Tensor:
        """Every rank's part, in order, along the sequence."""
        batch, _, *rest = x.shape
        sizes = [(batch, part, *rest) for part in self.seq_parts]
        parts = self.comm.exchange([x] * self.size, sizes, name="gather seq", group=self.ranks)
        return torch.cat(parts, dim=DIM)

    def scattered(self, x: Tensor) -> Tensor:
        """The sum over ranks of this rank's part of the sequence, added in rank order."""
        parts = [part.contiguous() for part in torch.split(x, self.seq_parts, dim=DIM)]
        size = tuple(parts[self.rank].shape)
        received = self.comm.exchange(
            parts, [size] * self.size, name="scatter seq", group=self.ranks
        )
        total = received[0]
        for part in received[1:]:
            total = total + part
        return total


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.gathered(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.scattered(grad), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.scattered(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.gathered(grad.contiguous()), None


_gather = torch.compiler.disable(_Gather.apply)  # type: ignore[no-untyped-call]
_scatter_sum = torch.compiler.disable(_ScatterSum.apply)  # type: ignore[no-untyped-call]

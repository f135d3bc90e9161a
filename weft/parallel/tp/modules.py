"""Modules whose parameters are split: the same results as the whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.nn.experts.feed_forward import Experts
from weft.nn.losses import LinearCrossEntropy
from weft.nn.norm import RMSNorm, wide_dtype
from weft.nn.rows_loss import Rest, RowsLoss
from weft.parallel.runtime import AxisGroup, SplitForm, Sum
from weft.parallel.split_experts import SplitExperts
from weft.parallel.split_vocab import VocabCrossEntropy, VocabEmbedding


class RowLinear(nn.Module):
    """A linear layer split along its input: terms are made complete, then comes the bias."""

    def __init__(self, linear: nn.Module, total: Sum) -> None:
        super().__init__()
        assert isinstance(linear, nn.Linear) and total.complete, f"{linear} gives a term"
        self.bias = linear.bias
        linear.register_parameter("bias", None)
        self.product = linear
        self._complete = total.complete
        self._pieces = total.pieces

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, own d_in]`` to ``[batch, own seq, d_out]``."""
        if self._pieces is None:
            y = self._complete(self.product(x))
        else:
            y = self._pieces.completed(self.product, x)
        return y if self.bias is None else y + self.bias


class VocabRowsLoss(nn.Module):
    """``RowsLoss`` of a part of the head whose rows are split once more: every rank says what all
    of them have found."""

    def __init__(self, rows: nn.Module, total: Sum) -> None:
        super().__init__()
        assert isinstance(rows, RowsLoss), f"{rows} is no part of a loss"
        self._own = RowsLoss(rows.first + total.first)
        self._group = total.group

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Rest]:
        """As the whole part's."""
        found, rest = self._own(hidden, weight, targets)
        talk, ranks = self._group.comm, self._group.ranks
        largest = found[..., 0].clone()
        talk.all_reduce(largest, name="vocab max", group=ranks, largest=True)
        shrunk = (found[..., 0] - largest).exp()
        sums = torch.stack([found[..., 1] * shrunk, found[..., 2]])
        talk.all_reduce(sums, name="vocab sums", group=ranks)
        return torch.stack([largest, *sums], -1), rest


class SplitNorm(nn.Module):
    """``RMSNorm`` over channels of which each rank has a part; their squares are added up."""

    def __init__(self, norm: nn.Module, total: Sum) -> None:
        super().__init__()
        assert isinstance(norm, RMSNorm), f"{norm} is no norm"
        self.weight = norm.weight
        self._eps, self._group = norm.eps, total.group
        self._held = sum(len(part) for parts in total.parts for part in parts)
        # Where several ranks hold the same channels, both sums count them as often.

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, own channels]`` to as much."""
        wide = x.to(wide_dtype(x))
        squares: Tensor = _OfAll.apply(  # type: ignore[no-untyped-call]
            wide.square().sum(-1, keepdim=True), self._group
        )
        return (wide * (squares / self._held + self._eps).rsqrt() * self.weight).to(x.dtype)


class _OfAll(torch.autograd.Function):
    """The sum of all ranks' terms, of which every rank makes something of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


def _summed(x: Tensor, group: AxisGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    group.comm.all_reduce(total, name="squares of norms", group=group.ranks)
    return total


SPLIT_FORMS: Mapping[type[nn.Module], SplitForm] = {
    nn.Linear: RowLinear,
    nn.Embedding: VocabEmbedding,
    LinearCrossEntropy: VocabCrossEntropy,
    RowsLoss: VocabRowsLoss,
    Experts: SplitExperts,
    RMSNorm: SplitNorm,
}

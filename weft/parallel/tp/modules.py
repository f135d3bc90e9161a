"""Modules whose parameters are split: the same results as the whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.nn.experts.feed_forward import Experts
from weft.nn.losses import LinearCrossEntropy
from weft.nn.norm import RMSNorm, wide_dtype
from weft.nn.rows_loss import Rest, RowsLoss
from weft.parallel.runtime import AxisGroup, SplitForm, Sum
from weft.parallel.split_experts import SplitExperts

CHUNK_TOKENS = 1024
"""Tokens whose logits are made at once, on each rank its part of the vocabulary. Their
probabilities are kept for backward, in fp32 (fp64 in fp64): ``[tokens, own vocab]`` in all."""


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


class VocabEmbedding(nn.Module):
    """An embedding split along the vocabulary: tokens of other ranks' parts give zeros."""

    def __init__(self, embedding: nn.Module, total: Sum) -> None:
        super().__init__()
        assert isinstance(embedding, nn.Embedding) and total.complete, f"{embedding} gives a term"
        self.weight = embedding.weight
        self._first = total.first
        self._complete = total.complete

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, seq]`` to ``[batch, own seq, d_model]``."""
        local = tokens - self._first
        ours = (local >= 0) & (local < self.weight.shape[0])
        found = F.embedding(local.where(ours, 0), self.weight)
        return self._complete(found * ours[..., None])


class VocabCrossEntropy(nn.Module):
    """``linear_cross_entropy`` of a head split along the vocabulary, which adds up what it needs by
    itself. No logits are gathered.

    ``weight`` ``[own vocab, d_model]`` is this rank's part, ``hidden`` ``[batch, seq, d_model]``,
    ``targets`` and ``weights`` ``[batch, seq]`` are whole; every rank gets the whole sum.
    """

    def __init__(self, _: nn.Module, total: Sum) -> None:
        super().__init__()
        self._first = total.first
        self._group = total.group

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        whole = hidden.flatten(0, 1)  # [tokens, d_model]
        local = (targets - self._first).reshape(-1)
        total = whole[:0].sum(dtype=wide_dtype(whole))  # of no tokens; backward goes on from it
        for low in range(0, len(whole), CHUNK_TOKENS):
            rows = slice(low, low + CHUNK_TOKENS)
            losses: Tensor = _VocabLosses.apply(  # type: ignore[no-untyped-call]
                F.linear(whole[rows], weight), local[rows], self._group
            )
            total = total + (losses * weights.reshape(-1)[rows].to(losses.dtype)).sum()
        return total


class _VocabLosses(torch.autograd.Function):
    """Losses ``[tokens]`` from each rank's logits ``[tokens, own vocab]``.

    Three numbers a token cross ranks: the largest logit, the sum of exponentials, the target's.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, local: Tensor, group: AxisGroup) -> Tensor:
        logits = logits.to(wide_dtype(logits))
        largest = logits.amax(-1)
        group.comm.all_reduce(largest, name="vocab max", group=group.ranks, largest=True)
        shifted = logits - largest[:, None]
        ours = (local >= 0) & (local < logits.shape[1])
        row = torch.arange(len(local), device=local.device)
        index = local.where(ours, 0)
        exponentials = shifted.exp()
        sums = torch.stack([exponentials.sum(-1), shifted[row, index] * ours])
        group.comm.all_reduce(sums, name="vocab sums", group=group.ranks)
        ctx.save_for_backward(exponentials / sums[0][:, None], ours, index)
        return sums[0].log() - sums[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        probabilities, ours, index = ctx.saved_tensors
        row = torch.arange(len(index), device=index.device)
        d_logits = probabilities
        d_logits[row, index] -= ours.to(d_logits.dtype)
        return d_logits * grad[:, None], None, None


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

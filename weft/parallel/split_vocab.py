"""Tables of a vocabulary of which each rank has some rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.nn.norm import wide_dtype
from weft.parallel.runtime import AxisGroup, Sum

CHUNK_TOKENS = 1024
"""Tokens whose logits are made at once, on each rank its part of the vocabulary. Their
probabilities are kept for backward, in fp32 (fp64 in fp64): ``[tokens, own vocab]`` in all."""


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

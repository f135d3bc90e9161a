"""Cross-entropy of a linear head of which others have the other rows, in two steps.

First every part says what it has found of each token; with what all have found it then knows the
loss, and its gradients. No logits go anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.nn.norm import wide_dtype

FOUND = 3
"""Numbers that a part finds of each token: its largest logit; the sum of its exponentials, each
divided by that of the largest; and the target's logit, or 0 where that is in another part."""
CHUNK_TOKENS = 1024
"""Tokens whose logits are in a wide dtype at once; as they come all are kept for backward."""

Rest = Callable[[Tensor], Tensor]
"""From what all parts together have found ``[batch, seq, FOUND]`` to the losses ``[batch, seq]``,
whose gradients reach this part's rows and hidden states."""


class RowsLoss(nn.Module):
    """``weight`` ``[own rows, d_model]`` has rows of the vocabulary from ``first`` on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Rest]:
        """``hidden`` ``[batch, seq, d_model]``, ``targets`` ``[batch, seq]``; what the part has
        found, ``[batch, seq, FOUND]`` in fp64 or fp32, and the rest."""
        logits = F.linear(hidden.flatten(0, 1), weight)  # [tokens, own rows]
        local = (targets - self.first).reshape(-1)
        ours = (local >= 0) & (local < len(weight))
        index = local.where(ours, 0)[:, None]
        parts = [_found(*chunk) for chunk in _chunks(logits.detach(), index, ours)]
        found = torch.cat(parts).view(*targets.shape, FOUND)

        def rest(merged: Tensor) -> Tensor:
            losses: Tensor = _Losses.apply(logits, merged.flatten(0, 1), index, ours)  # type: ignore[no-untyped-call]
            return losses.view_as(targets)

        return found, rest


def merged(found: Sequence[Tensor]) -> Tensor:
    """What parts have found together, added in their order."""
    together = torch.stack(list(found))  # [parts, batch, seq, FOUND]
    largest = together[..., 0].amax(0)
    sums, chosen = torch.zeros_like(largest), torch.zeros_like(largest)
    for part in together:
        sums += part[..., 1] * (part[..., 0] - largest).exp()
        chosen += part[..., 2]
    return torch.stack([largest, sums, chosen], -1)


def _chunks(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(torch.split(tensor, CHUNK_TOKENS) for tensor in tensors), strict=True))


def _found(logits: Tensor, index: Tensor, ours: Tensor) -> Tensor:
    """``[tokens, FOUND]``."""
    wide = logits.to(wide_dtype(logits))
    largest = wide.amax(-1)
    sums = (wide - largest[:, None]).exp().sum(-1)
    return torch.stack([largest, sums, wide.gather(1, index)[:, 0] * ours], -1)


class _Losses(torch.autograd.Function):
    """d logits = softmax(logits of all parts) - onehot(targets), in this part's rows."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, found: Tensor, index: Tensor, ours: Tensor) -> Tensor:
        log_sum = found[:, 0] + found[:, 1].log()
        ctx.save_for_backward(logits, log_sum, index, ours)
        return log_sum - found[:, 2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        d_logits = torch.empty_like(ctx.saved_tensors[0])
        for out, logits, log_sum, index, ours, each in _chunks(d_logits, *ctx.saved_tensors, grad):
            chunk = (logits.to(log_sum.dtype) - log_sum[:, None]).exp_()
            chunk.scatter_add_(1, index, -ours.to(chunk.dtype)[:, None])
            out.copy_(chunk.mul_(each[:, None]))
            del chunk  # the next one needs the room
        return d_logits, None, None, None

"""Cross-entropy of a linear head, without ever holding the logits of the whole microbatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_TOKENS = 256
"""Tokens whose logits live at once; a chunk of fp32 logits should stay in a core's cache."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor
) -> Tensor:
    """``sum(weights * cross_entropy(hidden @ weight.T, targets))``: a sum, never a mean.

    ``hidden`` ``[..., d_model]``, ``weight`` ``[vocab, d_model]``, ``targets`` ``[...]`` int64,
    ``weights`` ``[...]`` of any float dtype, not differentiated. The result is a scalar, fp64
    for fp64 inputs and fp32 otherwise. Gradients are made in the forward pass, chunk by chunk;
    where gradients are off none are.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    targets, weights = targets.reshape(-1), weights.reshape(-1)
    assert flat.shape[0] == targets.shape[0] == weights.shape[0], (
        f"{flat.shape[0]} tokens, {targets.shape[0]} targets, {weights.shape[0]} weights"
    )
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: Tensor = _LinearCrossEntropy.apply(flat, weight, targets, weights)  # type: ignore[no-untyped-call]
        return loss
    total = flat.new_zeros((), dtype=_exact(flat))
    for rows in _chunks(flat.shape[0]):
        _, term = _log_probabilities(flat[rows], weight, targets[rows], weights[rows])
        total += term
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    """d logits = weights * (softmax(logits) - onehot(targets)), times the incoming gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor
    ) -> Tensor:
        exact = _exact(hidden)
        total = hidden.new_zeros((), dtype=exact)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=exact)
        for rows in _chunks(hidden.shape[0]):
            part = hidden[rows]
            logp, term = _log_probabilities(part, weight, targets[rows], weights[rows])
            total += term
            scale = weights[rows].to(exact)[:, None]
            d_logits = logp.exp_().mul_(scale)  # [chunk, vocab]
            d_logits.scatter_add_(1, targets[rows][:, None], -scale)
            d_logits = d_logits.to(hidden.dtype)
            torch.mm(d_logits, weight, out=d_hidden[rows])
            if exact == hidden.dtype:
                d_weight.addmm_(d_logits.T, part)
            else:
                d_weight += d_logits.T @ part
        ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grad.to(d_hidden.dtype), d_weight * grad.to(d_weight.dtype), None, None


def _exact(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _chunks(tokens: int) -> list[slice]:
    return [slice(start, start + CHUNK_TOKENS) for start in range(0, tokens, CHUNK_TOKENS)]


def _log_probabilities(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities ``[chunk, vocab]`` and the chunk's term of the loss."""
    exact = _exact(hidden)
    logp = torch.log_softmax(hidden @ weight.T, dim=-1, dtype=exact)
    chosen = logp.gather(1, targets[:, None])[:, 0]
    return logp, -(chosen * weights.to(exact)).sum()

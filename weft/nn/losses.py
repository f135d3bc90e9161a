"""Cross-entropy of a linear head, without ever holding the logits of the whole microbatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.nn.norm import wide_dtype

CHUNK_LOGITS = {"cpu": 1 << 20}
"""Logits that live at once, by device type: on a CPU as many as a core's cache holds in fp32."""
CHUNK_LOGITS_ELSEWHERE = 1 << 28
MIN_CHUNK_TOKENS = 256
"""Fewer would make the products small, whatever the vocabulary."""


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
    total = flat.new_zeros((), dtype=wide_dtype(flat))
    for rows in _chunks(flat, weight):
        total += _softmax_loss(flat[rows], weight, targets[rows], weights[rows])[1]
    return total


class LinearCrossEntropy(nn.Module):
    """``linear_cross_entropy`` as a module, so that a layout can say what is divided around it."""

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """As the function's."""
        return linear_cross_entropy(hidden, weight, targets, weights)


class _LinearCrossEntropy(torch.autograd.Function):
    """d logits = weights * (softmax(logits) - onehot(targets)), times the incoming gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor
    ) -> Tensor:
        wide = wide_dtype(hidden)
        total = hidden.new_zeros((), dtype=wide)
        d_hidden = torch.empty_like(hidden)
        is_trained = ctx.needs_input_grad[1]
        d_weight = torch.zeros_like(weight, dtype=wide) if is_trained else None
        for rows in _chunks(hidden, weight):
            part = hidden[rows]
            probabilities, loss = _softmax_loss(part, weight, targets[rows], weights[rows])
            total += loss
            scale = weights[rows].to(wide)[:, None]
            d_logits = probabilities.mul_(scale)  # [chunk, vocab]
            d_logits.scatter_add_(1, targets[rows][:, None], -scale)
            d_logits = d_logits.to(hidden.dtype)
            torch.mm(d_logits, weight, out=d_hidden[rows])
            if d_weight is not None and wide == hidden.dtype:
                d_weight.addmm_(d_logits.T, part)
            elif d_weight is not None:
                d_weight += d_logits.T @ part
            del probabilities, d_logits  # the next chunk's need the room
        ctx.save_for_backward(d_hidden, None if d_weight is None else d_weight.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        scaled = None if d_weight is None else d_weight * grad.to(d_weight.dtype)
        return d_hidden * grad.to(d_hidden.dtype), scaled, None, None


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Rows of ``hidden`` ``[tokens, d_model]`` whose logits are made together."""
    logits = CHUNK_LOGITS.get(hidden.device.type, CHUNK_LOGITS_ELSEWHERE)
    size = max(MIN_CHUNK_TOKENS, logits // weight.shape[0])
    return [slice(start, start + size) for start in range(0, hidden.shape[0], size)]


def _softmax_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Probabilities ``[chunk, vocab]``, fp32 or fp64, and the chunk's term of the sum.

    The logarithm of a row's sum is read off its greatest probability, which cannot vanish.
    """
    wide = wide_dtype(hidden)
    logits = hidden @ weight.T
    probabilities = torch.softmax(logits, dim=-1, dtype=wide)
    log_sum = logits.amax(-1).to(wide) - probabilities.amax(-1).log()
    chosen = logits.gather(1, targets[:, None])[:, 0].to(wide)
    return probabilities, ((log_sum - chosen) * weights.to(wide)).sum()

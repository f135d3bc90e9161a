"""Cross-entropy of a linear head, without ever holding the logits of the whole microbatch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.nn.norm import wide_dtype
from weft.nn.tried import works

CHUNK_LOGITS = {"cpu": 1 << 20}
"""Logits that live at once, by device type: on a CPU as many as a core's cache holds in fp32."""
CHUNK_LOGITS_ELSEWHERE = 1 << 28
CHUNK_LOGITS_COMPILED = 1 << 29
"""Which become their gradients where they are."""
MIN_CHUNK_TOKENS = 256
"""Fewer would make the products small, whatever the vocabulary."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, *, compiled: bool = False
) -> Tensor:
    """``sum(weights * cross_entropy(hidden @ weight.T, targets))``: a sum, never a mean.

    ``hidden`` ``[..., d_model]``, ``weight`` ``[vocab, d_model]``, ``targets`` ``[...]`` int64,
    ``weights`` ``[...]`` of any float dtype, not differentiated. The result is a scalar, fp64
    for fp64 inputs and fp32 otherwise. Gradients are made in the forward pass, chunk by chunk;
    where gradients are off none are.

    ``compiled``: by PyTorch's compiler, which reads logits twice and writes them once; not on a
    CPU, where a chunk stays in the cache anyway.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    targets, weights = targets.reshape(-1), weights.reshape(-1)
    assert flat.shape[0] == targets.shape[0] == weights.shape[0], (
        f"{flat.shape[0]} tokens, {targets.shape[0]} targets, {weights.shape[0]} weights"
    )
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        compiled = compiled and flat.device.type != "cpu"
        loss: Tensor = _LinearCrossEntropy.apply(flat, weight, targets, weights, compiled)  # type: ignore[no-untyped-call]
        return loss
    total = flat.new_zeros((), dtype=wide_dtype(flat))
    for rows in _chunks(flat, weight):
        total += _softmax_loss(flat[rows], weight, targets[rows], weights[rows])[1]
    return total


class LinearCrossEntropy(nn.Module):
    """``linear_cross_entropy`` as a module, so that a layout can say what is divided around it."""

    compiled = False

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """As the function's."""
        return linear_cross_entropy(hidden, weight, targets, weights, compiled=self.compiled)


class _LinearCrossEntropy(torch.autograd.Function):
    """d logits = weights * (softmax(logits) - onehot(targets)), times the incoming gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, compiled: bool
    ) -> Tensor:
        wide = wide_dtype(hidden)
        total = hidden.new_zeros((), dtype=wide)
        d_hidden = torch.empty_like(hidden)
        is_trained = ctx.needs_input_grad[1]
        d_weight = torch.zeros_like(weight, dtype=wide) if is_trained else None
        for rows in _chunks(hidden, weight, compiled=compiled):
            part = hidden[rows]
            if compiled:
                d_logits = part @ weight.T
                total += _compiled()(d_logits, targets[rows], weights[rows])
            else:
                d_logits, loss = _gradient(part, weight, targets[rows], weights[rows])
                total += loss
            torch.mm(d_logits, weight, out=d_hidden[rows])
            if d_weight is not None:
                _add_product(d_weight, d_logits.T, part)
            del d_logits  # the next chunk's need the room
        ctx.save_for_backward(d_hidden, None if d_weight is None else d_weight.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        scaled = None if d_weight is None else d_weight * grad.to(d_weight.dtype)
        return d_hidden * grad.to(d_hidden.dtype), scaled, None, None, None


def _chunks(hidden: Tensor, weight: Tensor, *, compiled: bool = False) -> list[slice]:
    """Rows of ``hidden`` ``[tokens, d_model]`` whose logits are made together."""
    elsewhere = CHUNK_LOGITS_COMPILED if compiled else CHUNK_LOGITS_ELSEWHERE
    logits = CHUNK_LOGITS.get(hidden.device.type, elsewhere)
    size, tokens = max(MIN_CHUNK_TOKENS, logits // weight.shape[0]), hidden.shape[0]
    if compiled:  # for one size, where possible
        size = -(-tokens // max(-(-tokens // size), 1))
    return [slice(start, start + size) for start in range(0, tokens, max(size, 1))]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, whose sum is not rounded before it is added where the device has
    such a product."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif _adds_in_wide(total.device):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


@cache
def _adds_in_wide(device: torch.device) -> bool:
    """Tried once: not every PyTorch has it, and none for every device."""

    def adds() -> bool:
        total = torch.ones(16, 16, device=device)
        ones = total.bfloat16()
        torch.addmm(total, ones, ones, out_dtype=total.dtype, out=total)
        return bool((total == 17).all())

    return works(adds)


@cache
def _compiled() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    # Of few tokens it says which of two ways it takes.
    warnings.filterwarnings("ignore", r"\s*Online softmax is disabled", UserWarning)
    return torch.compile(into_gradient)  # of ever new sizes it goes on without the compiler


def into_gradient(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The term of the sum of these ``logits`` ``[chunk, vocab]``, which become its gradient."""
    wide = logits.to(wide_dtype(logits))
    largest = wide.amax(-1, keepdim=True)
    log_sum = (wide - largest).exp().sum(-1, keepdim=True).log() + largest
    scale, target = weights.to(wide.dtype)[:, None], targets[:, None]
    loss = ((log_sum - wide.gather(1, target)) * scale).sum()
    is_target = torch.arange(logits.shape[1], device=logits.device) == target
    logits.copy_(((wide - log_sum).exp() - is_target.to(wide.dtype)) * scale)
    return loss


def _gradient(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the logits ``[chunk, vocab]``, and the chunk's term of the sum."""
    probabilities, loss = _softmax_loss(hidden, weight, targets, weights)
    scale = weights.to(probabilities.dtype)[:, None]
    d_logits = probabilities.mul_(scale)
    d_logits.scatter_add_(1, targets[:, None], -scale)
    return d_logits.to(hidden.dtype), loss


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

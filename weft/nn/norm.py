"""Normalisation over the last dimension."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def wide_dtype(x: Tensor) -> torch.dtype:
    """What sums over the numbers of ``x`` are made in: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (arXiv 1910.07467)."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and result: ``[..., d_model]``, in the dtype of ``x``; statistics in fp32."""
        if x.device.type != "cpu":
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        result: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return result


class _RMSNorm(torch.autograd.Function):
    """On a CPU ``F.rms_norm`` is a chain of five operations each way; this is half the passes.

    With ``n = x r`` and ``h = g weight``: ``dx = r (h - n mean(h n))``, ``dweight = sum(g n)``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(wide_dtype(x))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, r)
        result: Tensor = wide * r
        # What an operation in place gives back, or ``to`` the dtype that is there, PyTorch 2.11's
        # compiler differentiates a second time: wrong gradients, in silence.
        result = result * weight if torch.compiler.is_compiling() else result.mul_(weight)
        return result if result.dtype == x.dtype else result.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, r = ctx.saved_tensors
        d_model, r = x.shape[-1], r.reshape(-1, 1)
        n = x.reshape(-1, d_model) * r
        g = grad.reshape(-1, d_model).to(r.dtype)
        d_weight = (g * n).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        h = g * weight
        mean = torch.linalg.vecdot(h, n).div_(d_model)[:, None]
        d_x = h.addcmul_(n, mean, value=-1).mul_(r)
        return d_x.to(x.dtype).view_as(x), d_weight, None

"""The linear layers of experts, whose products are of factors in eight bits.

Rows are tokens of any samples in the order of their experts, of this rank or of others: so each has
a scale of its own, and each expert's matrix has those of a layer's. What a row comes to then
depends on no other, however samples, experts and features are divided. The sums over rows that make
a weight's gradient are of the same rounded factors, in 16 bits: rows with unlike scales have no
product in eight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.nn.experts.feed_forward import Expert
from weft.nn.experts.grouped import grouped_product, grouped_weight_grad
from weft.parallel.fp8.linear import NEEDS_NUMBERS, Factors
from weft.parallel.fp8.rounding import Scaled, can_multiply, grouped_by_tensor_cores


class ScaledExpert(nn.Module):
    """Shares the matrices of an ``Expert``, and multiplies in eight bits."""

    def __init__(self, expert: Expert, factors: Factors) -> None:
        super().__init__()
        self.weight = expert.weight
        self._factors = factors
        self._traced = replace(factors, fused=False)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """As ``grouped_product``."""
        multiply, factors = GroupedMultiply.apply, self._factors
        if torch.compiler.is_compiling():
            if factors.is_opaque or NEEDS_NUMBERS:  # there are never twice as many rows
                from weft.parallel.fp8.uncompiled import multiply_grouped as multiply
            else:
                factors = self._traced
        made: Tensor = multiply(x, self.weight, ends, factors)  # type: ignore[no-untyped-call]
        return made


class GroupedMultiply(torch.autograd.Function):
    """The three products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, factors: Factors) -> Tensor:
        rows = factors.row(x, is_gradient=False)
        ctx.factors, ctx.dtype = factors, x.dtype
        ctx.save_for_backward(weight, ends, rows.values, rows.scale)
        return _product(rows, factors.matrices(weight, 2), ends, x.dtype, factors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, ends, *kept = ctx.saved_tensors
        factors: Factors = ctx.factors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        rows = factors.row(grad, is_gradient=True)
        d_x = d_weight = None
        if needs_x:
            turned = factors.matrices(weight, 1)
            turned = Scaled(turned.values.mT, turned.scale.mT)
            d_x = _product(rows, turned, ends, ctx.dtype, factors)
        if needs_weight:
            x = Scaled(*kept)
            d_weight = grouped_weight_grad(rows.exact(ctx.dtype), x.exact(ctx.dtype), ends)
        return d_x, d_weight, None, None


def _product(
    rows: Scaled, matrices: Scaled, ends: Tensor, dtype: torch.dtype, factors: Factors
) -> Tensor:
    """``[rows, k]`` times each expert's ``[n, k]``, transposed."""
    if factors.by_tensor_cores and dtype == torch.bfloat16 and can_multiply(rows, matrices):
        return grouped_by_tensor_cores(rows, matrices, ends, dtype)
    return grouped_product(rows.exact(dtype), matrices.exact(dtype), ends)

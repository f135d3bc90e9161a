"""A linear layer whose three products are of factors in eight bits (arXiv 2209.05433).

What comes in, ``x`` ``[samples, tokens, d_in]``, and the gradient of what goes out, ``g``
``[samples, tokens, d_out]``, are rounded with scales of their own for every sample; the weight
``w`` ``[d_out, d_in]`` is one. So the numbers depend neither on how many samples are computed at
once nor, as the largest is of all ranks that hold a part, on how weights and samples are divided:

    y = x w^T       dx = g w        dw = sum over samples of g^T x

Sums are in the accumulator of the device, biases and results in the dtype of ``x``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.parallel.fp8.history import GRADIENT, STREAM, WEIGHT, History
from weft.parallel.fp8.repeated import Repeated
from weft.parallel.fp8.rounding import Combine, Scaled, Spans, product, scaled
from weft.parallel.pipeline.deferred import WeightWork, now_or_later
from weft.parallel.runtime import AxisGroup
from weft.precision.roles import Products

NEEDS_NUMBERS = torch.__version__.startswith("2.11.")
"""Its compiler ends at a Function in whose forward a size that may change turns out not to."""

TOKENS, FEATURES = 1, 2
"""Dimensions of ``x`` and ``g``."""


@dataclass(frozen=True, slots=True)
class Factors:
    """How one layer rounds what it multiplies."""

    products: Products
    divided: tuple[bool, bool] = (False, False)
    """Other ranks hold other parts of ``d_out``, and of ``d_in``."""
    groups: Sequence[AxisGroup] = ()
    """Of those ranks."""
    token_groups: Sequence[AxisGroup] = ()
    """Of ranks that have other tokens of the same samples."""
    repeated: Repeated | None = None
    """Where each of several ranks has a term of the gradient of what goes out."""
    history: History | None = None
    """Where scales are delayed."""
    by_tensor_cores: bool = False
    fused: bool = False
    """By compiled passes, where no compiled block looks in."""

    @property
    def is_opaque(self) -> bool:
        """Compilers are not to look into it: some scales are of several ranks."""
        if self.repeated is not None:
            return True
        shared = any(self.divided) or bool(self.token_groups)
        return shared and self.products.scaling != "blockwise"

    @property
    def is_same_for_all_sums(self) -> bool:
        """What is rounded for one product is so for the others."""
        return self.products.scaling in ("tensorwise", "delayed")

    def stream(self, x: Tensor, over: int, *, is_gradient: bool) -> Scaled:
        """``x``, or ``g``, for a sum over tokens or features."""
        spans = {
            "tensorwise": Spans(whole=(TOKENS, FEATURES)),
            "rowwise": Spans(whole=(over,)),
            "blockwise": Spans(blocks=(over,)),
            "delayed": Spans(whole=(TOKENS, FEATURES)),
        }[self.products.scaling]
        kind = GRADIENT if is_gradient else STREAM
        is_divided = self.divided[0 if is_gradient else 1] and FEATURES in spans.whole
        groups = [
            *(self.groups if is_divided else ()),
            *(self.token_groups if TOKENS in spans.whole else ()),
        ]
        return self._scaled(x, kind, spans, groups)

    def weight(self, w: Tensor, over: int) -> Scaled:
        """For a sum over ``d_out`` (0) or ``d_in`` (1)."""
        spans = {
            "tensorwise": Spans(whole=(0, 1)),
            "rowwise": Spans(whole=(over,)),
            "blockwise": Spans(blocks=(0, 1)),
            "delayed": Spans(whole=(0, 1)),
        }[self.products.scaling]
        is_divided = any(self.divided[dim] for dim in spans.whole)
        groups = self.groups if is_divided else ()
        return self._scaled(w, WEIGHT, spans, groups)

    def row(self, x: Tensor, *, is_gradient: bool) -> Scaled:
        """``[rows, features]`` of any samples, for a sum over features: each row by itself.

        Gradients have the dtype of the other factors: PyTorch's product of groups takes no other,
        and what is far below its row's largest hardly counts in a sum over that row.
        """
        is_blocks = self.products.scaling == "blockwise"
        spans = Spans(blocks=(1,)) if is_blocks else Spans(whole=(1,))
        is_divided = self.divided[0 if is_gradient else 1] and not is_blocks
        return self._scaled(x, STREAM, spans, self.groups if is_divided else ())

    def matrices(self, w: Tensor, over: int) -> Scaled:
        """``[experts, d_out, d_in]``, for a sum over ``d_out`` (1) or ``d_in`` (2)."""
        spans = {
            "rowwise": Spans(whole=(over,)),
            "blockwise": Spans(blocks=(1, 2)),
        }.get(self.products.scaling, Spans(whole=(1, 2)))
        is_divided = any(self.divided[dim - 1] for dim in spans.whole)
        return self._scaled(w, WEIGHT, spans, self.groups if is_divided else ())

    def _scaled(self, x: Tensor, kind: int, spans: Spans, groups: Sequence[AxisGroup]) -> Scaled:
        combine: Combine | None = partial(_of_all, groups) if groups else None
        asked = self.products
        dtype = vars(torch)[asked.gradients if kind == GRADIENT else asked.factors]
        if self.history is not None:
            return self.history.scaled(kind, x, dtype, spans, combine=combine, fused=self.fused)
        return scaled(x, dtype, spans, block=asked.block, combine=combine, fused=self.fused)


def _of_all(groups: Sequence[AxisGroup], largest: Tensor) -> Tensor:
    found = largest.float().contiguous()
    for group in groups if found.numel() else ():
        group.comm.all_reduce(found, name="fp8 scales", group=group.ranks, largest=True)
    return found


class ScaledLinear(nn.Linear):
    """Shares all that a linear layer has, and multiplies in eight bits."""

    def __init__(self, linear: nn.Linear, factors: Factors) -> None:
        vars(self).update(vars(linear))
        self._factors = factors
        self._traced = replace(factors, fused=False)
        self._work: WeightWork | None = None

    def defer(self, work: WeightWork) -> None:
        """Give weight gradients to ``work`` while that is deferring."""
        self._work = work

    def forward(self, x: Tensor) -> Tensor:
        """``[samples, .., d_in]`` to ``[samples, .., d_out]``."""
        multiply, factors = Multiply.apply, self._factors
        if torch.compiler.is_compiling():
            if factors.is_opaque:
                from weft.parallel.fp8.uncompiled import multiply
            else:
                factors = self._traced
                _ = NEEDS_NUMBERS and [range(size) for size in x.shape]  # for these sizes alone
        made: Tensor = multiply(x, self.weight, self.bias, factors, self._work)  # type: ignore[no-untyped-call]
        return made


class Multiply(torch.autograd.Function):
    """The three products; that of the weight may wait."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        factors: Factors,
        work: WeightWork | None,
    ) -> Tensor:
        samples = _by_sample(x)
        rounded = factors.stream(samples, FEATURES, is_gradient=False)
        y = product(
            rounded,
            factors.weight(weight, 1),
            x.dtype,
            by_tensor_cores=factors.by_tensor_cores,
            fused=factors.fused,
        )
        ctx.factors, ctx.work, ctx.shape = factors, work, x.shape
        ctx.weight, ctx.bias = weight, bias
        if factors.is_same_for_all_sums:  # in half the bytes
            ctx.save_for_backward(weight, rounded.values, rounded.scale)
        else:
            ctx.save_for_backward(weight, samples)
        y = y.reshape(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        factors: Factors = ctx.factors
        if factors.repeated is not None:
            grad = factors.repeated.summed(grad)
        samples = _by_sample(grad)
        is_same = factors.is_same_for_all_sums
        d_x = None
        left: Tensor | Scaled = samples
        if needs_x or is_same:
            rounded = factors.stream(samples, FEATURES, is_gradient=True)
            d_x = _input_grad(factors, rounded, weight, grad.dtype).reshape(ctx.shape)
            left = rounded if is_same else samples
        right = Scaled(*kept) if is_same else kept[0].detach()  # no history, as other layers
        weight_grad = partial(_weight_grad, factors, left, right, grad.dtype)
        bias_grad = partial(torch.sum, grad.flatten(0, -2), 0)
        d_weight = now_or_later(ctx.work, ctx.weight, weight_grad if needs_weight else None)
        d_bias = now_or_later(ctx.work, ctx.bias, bias_grad if needs_bias else None)
        return d_x if needs_x else None, d_weight, d_bias, None, None


def _by_sample(x: Tensor) -> Tensor:
    """``[samples, tokens, features]``; a sample without tokens has one, and so have features that
    are alone."""
    x = x if x.dim() > 1 else x[None]
    return x.reshape(len(x), prod(x.shape[1:-1]), x.shape[-1])


def _input_grad(factors: Factors, grad: Scaled, weight: Tensor, dtype: torch.dtype) -> Tensor:
    turned = factors.weight(weight, 0)
    turned = Scaled(turned.values.T, turned.scale.T)
    return product(
        grad, turned, dtype, by_tensor_cores=factors.by_tensor_cores, fused=factors.fused
    )


def _weight_grad(
    factors: Factors, grad: Tensor | Scaled, x: Tensor | Scaled, dtype: torch.dtype
) -> Tensor:
    """The sum over tokens, sample by sample where each has a scale of its own."""
    if isinstance(grad, Tensor):
        grad = factors.stream(grad, TOKENS, is_gradient=True)
    if isinstance(x, Tensor):
        x = factors.stream(x, TOKENS, is_gradient=False)
    if grad.scale.numel() == 1 == x.scale.numel():
        grad, x = (Scaled(part.values.flatten(0, 1)[None], part.scale) for part in (grad, x))
    samples, tokens = x.values.shape[:2]
    if not (factors.by_tensor_cores and samples and tokens % 16 == 0):
        rows, columns = grad.exact(dtype).flatten(0, 1), x.exact(dtype).flatten(0, 1)
        return rows.T @ columns
    terms = (
        product(
            Scaled(grad.values[n].T, grad.scale[n].T),
            Scaled(x.values[n].T, x.scale[n].T),
            dtype,
            by_tensor_cores=True,
            fused=factors.fused,
        )
        for n in range(samples)
    )
    if samples == 1:
        return next(terms)
    total = next(terms).float()  # in bf16 each sample would round the sum once more
    for term in terms:
        total += term
    return total.to(dtype)

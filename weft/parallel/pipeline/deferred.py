"""Backward in halves: the gradient of a linear layer's input at once, of its weight when asked.

What zero-bubble schedules need. Norms, embeddings and the head, whose weight gradients are a small
part or come with the forward pass, keep a whole backward, done in the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.parallel.plain import more_than_a_product
from weft.parallel.taking import is_watched

Job = tuple[nn.Parameter, Callable[[], Tensor]]
"""A parameter, and what makes its gradient of one backward pass."""


class WeightWork:
    """Weight gradients that wait for their turn."""

    def __init__(self) -> None:
        self._makes: dict[nn.Parameter, list[Callable[[], Tensor]]] = {}
        self.is_deferring = False

    def add(self, param: nn.Parameter, make: Callable[[], Tensor]) -> None:
        self._makes.setdefault(param, []).append(make)

    def take(self) -> list[Job]:
        """The jobs of the backward that just ended, one a parameter; the list starts anew."""
        makes, self._makes = self._makes, {}
        return [(param, partial(_sum, each)) for param, each in makes.items()]


def _sum(makes: Sequence[Callable[[], Tensor]]) -> Tensor:
    """A stage that computes in passes uses a parameter once in each."""
    total = makes[0]()
    for make in makes[1:]:
        total += make()
    return total


def now_or_later(
    work: WeightWork | None, param: Tensor, make: Callable[[], Tensor] | None
) -> Tensor | None:
    """A gradient, None where it waits for its turn or where ``make`` is None: nobody needs it.

    None waits whose way to a parameter somebody watches, or that is differentiated itself.
    """
    if work is not None and work.is_deferring and make is not None and _may_wait(param):
        work.add(param, make)
        return None
    return None if make is None else make()


def _may_wait(param: Tensor) -> TypeGuard[nn.Parameter]:
    """It is no value that ``torch.func.functional_call`` put in the place of a parameter."""
    is_own = isinstance(param, nn.Parameter) and param.is_leaf
    return is_own and not is_watched(param) and not torch.is_grad_enabled()


def _product(linear: nn.Linear, work: WeightWork, x: Tensor) -> Tensor:
    """``[..., d_in]`` to ``[..., d_out]``, with the parameters that the layer has just now."""
    if torch.is_autocast_enabled(x.device.type):
        return F.linear(x, linear.weight, linear.bias)
    result: Tensor = _Linear.apply(x, linear.weight, linear.bias, work)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    """``dx = g w``, ``dw = g^T x``, ``db = sum(g)``; the last two may be put off."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, work: WeightWork
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias, ctx.work = weight, bias, work
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        d_x: Tensor | None = None
        if needs_x and torch.is_grad_enabled():  # to be differentiated again
            d_x = _InputGrad.apply(grad, weight, ctx.work)  # type: ignore[no-untyped-call]
        elif needs_x:
            d_x = grad @ weight
        rows, columns = _rows(grad), _rows(x)

        weight_grad = partial(torch.mm, rows.T, columns)
        bias_grad = partial(torch.sum, rows, 0)
        d_weight = now_or_later(ctx.work, ctx.weight, weight_grad if needs_weight else None)
        d_bias = now_or_later(ctx.work, ctx.bias, bias_grad if needs_bias else None)
        return d_x, d_weight, d_bias, None


class _InputGrad(torch.autograd.Function):
    """``g w``, which a layer may use in its forward: the weight's gradient by it may wait too."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, weight: Tensor, work: WeightWork) -> Tensor:
        ctx.save_for_backward(grad, weight)
        ctx.weight, ctx.work = weight, work
        return grad @ weight

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor | None, ...]:
        grad, weight = ctx.saved_tensors
        needs_grad, needs_weight, _ = ctx.needs_input_grad
        d_grad: Tensor | None = None
        if needs_grad:
            d_grad = _Linear.apply(d_x, weight, None, ctx.work)  # type: ignore[no-untyped-call]
        weight_grad = partial(torch.mm, _rows(grad).T, _rows(d_x))
        d_weight = now_or_later(ctx.work, ctx.weight, weight_grad if needs_weight else None)
        return d_grad, d_weight, None


def _rows(x: Tensor) -> Tensor:
    """``[..., d]`` to ``[rows, d]``. Views of what has a history keep it, and with it the stage's
    input until the work is done: only where that is differentiated again they may."""
    rows = x[None] if x.dim() == 1 else x.flatten(0, -2)
    return rows if torch.is_grad_enabled() else rows.detach()


@runtime_checkable
class Deferring(Protocol):
    """A module that can put off its own weight gradients."""

    def defer(self, work: WeightWork) -> None:
        """Give them to ``work`` from now on, while that is deferring."""


def defer_linears(module: nn.Module, work: WeightWork) -> None:
    """Let the weight gradients of linear layers in ``module``, or of the one that it is, wait.

    They stay the objects that they are. One that does more than a product is left alone.
    """
    if isinstance(module, Deferring):
        module.defer(work)
    elif type(module) is nn.Linear:  # a subclass may compute something else
        if not more_than_a_product(module):
            module.forward = partial(_product, module, work)  # type: ignore[method-assign]
    else:
        for child in module.children():
            defer_linears(child, work)

"""Backward in halves: the gradient of a linear layer's input at once, of its weight when asked.

What zero-bubble schedules need. Norms, embeddings and the head, whose weight gradients are a small
part or come with the forward pass, keep a whole backward, done in the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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
    work: WeightWork | None, param: nn.Parameter, make: Callable[[], Tensor] | None
) -> Tensor | None:
    """A gradient, None where it waits for its turn or where ``make`` is None: nobody needs it."""
    if work is not None and work.is_deferring and make is not None:
        work.add(param, make)
        return None
    return None if make is None else make()


class DeferredLinear(nn.Module):
    """Shares a linear layer's parameters and gives the same numbers."""

    def __init__(self, linear: nn.Linear, work: WeightWork) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self._work = work

    def forward(self, x: Tensor) -> Tensor:
        """``[..., d_in]`` to ``[..., d_out]``."""
        result: Tensor = _Linear.apply(x, self.weight, self.bias, self._work)  # type: ignore[no-untyped-call]
        return result


class _Linear(torch.autograd.Function):
    """``dx = g w``, ``dw = g^T x``, ``db = sum(g)``; the last two may be put off."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, work: WeightWork
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias, ctx.work = weight, bias, work
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        d_x: Tensor | None = grad @ weight if needs_x else None
        # Views of what has a history keep it, and with it the stage's input until the work is done.
        rows, columns = (tensor.detach().flatten(0, -2) for tensor in (grad, x))

        weight_grad = partial(torch.mm, rows.T, columns)
        bias_grad = partial(torch.sum, rows, 0)
        d_weight = now_or_later(ctx.work, ctx.weight, weight_grad if needs_weight else None)
        d_bias = now_or_later(ctx.work, ctx.bias, bias_grad if needs_bias else None)
        return d_x, d_weight, d_bias, None


@runtime_checkable
class Deferring(Protocol):
    """A module that can put off its own weight gradients."""

    def defer(self, work: WeightWork) -> None:
        """Give them to ``work`` from now on, while that is deferring."""


def defer_linears(module: nn.Module, work: WeightWork) -> nn.Module:
    """Replace linear layers in ``module`` by ones whose weight gradients can wait. Returns it.

    A module that is itself a linear layer is left alone, and its replacement returned.
    """
    if isinstance(module, Deferring):
        module.defer(work)
        return module
    if type(module) is nn.Linear:  # a subclass may compute something else
        return DeferredLinear(module, work)
    for name, child in module.named_children():
        module.register_module(name, defer_linears(child, work))
    return module

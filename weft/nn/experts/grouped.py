"""Products of tokens with the matrix of the expert that each goes to, none of them dropped.

Tokens lie in the order of their experts, so each expert multiplies consecutive ones. No sum is made
by atomic additions: what comes back to a token is gathered by the inverse of that order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Order(NamedTuple):
    """How the choices of ``n`` tokens, ``[n, top_k]`` flat, lie by expert."""

    places: Tensor
    """``[n * top_k]``: of each place in the new order, which choice is there."""
    back: Tensor
    """The inverse."""
    top_k: int
    ends: Tensor
    """``[experts]`` int32: behind each expert's last place."""


def by_expert(experts: Tensor, experts_in_all: int) -> Order:
    """Of the chosen ``experts`` ``[n, top_k]``; choices of one expert stay in their order."""
    flat = experts.flatten()
    places = torch.argsort(flat, stable=True)
    back = torch.empty_like(places)
    back[places] = torch.arange(len(places), device=places.device)
    ends = torch.bincount(flat, minlength=experts_in_all).cumsum(0).to(torch.int32)
    return Order(places, back, experts.shape[1], ends)


def spread(x: Tensor, order: Order) -> Tensor:
    """``[n, d_model]`` to ``[n * top_k, d_model]``: each token once for every choice, by expert."""
    result: Tensor = _Spread.apply(x, order)  # type: ignore[no-untyped-call]
    return result


def together(y: Tensor, shares: Tensor, order: Order) -> Tensor:
    """The other way: results by expert, times ``shares`` ``[n, top_k]``, added up by token."""
    own: Tensor = _Back.apply(y, order)  # type: ignore[no-untyped-call]
    choices = own.view(-1, order.top_k, own.shape[-1])
    total: Tensor = (choices * shares.to(y.dtype)[..., None]).sum(1)
    return total


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return x[order.places // order.top_k]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.order.back].view(-1, ctx.order.top_k, grad.shape[-1]).sum(1), None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return y[order.back]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.order.places], None


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Each expert's rows of ``x`` times its matrix, transposed: ``[rows, d_out]`` of ``x`` ``[rows,
    d_in]``, ``weight`` ``[experts, d_out, d_in]``. An expert without rows has a zero gradient."""
    result: Tensor = _Loop.apply(x, weight, ends)  # type: ignore[no-untyped-call]
    return result


class _Loop(torch.autograd.Function):
    """A product an expert, each in its place: nothing is put together afterwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        result = x.new_empty(len(x), weight.shape[1])
        parts = (torch.split(rows, ctx.sizes) for rows in (x, result))
        for own, out, matrix in zip(*parts, weight, strict=True):
            if len(own):
                torch.mm(own, matrix.T, out=out)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        d_x = torch.empty_like(x) if needs_x else None
        d_weight = torch.zeros_like(weight) if needs_weight else None
        start = 0
        for expert, size in enumerate(ctx.sizes):
            rows = slice(start, start + size)
            start += size
            if d_x is not None and size:
                torch.mm(grad[rows], weight[expert], out=d_x[rows])
            if d_weight is not None and size:
                torch.mm(grad[rows].T, x[rows], out=d_weight[expert])
        return d_x, d_weight, None

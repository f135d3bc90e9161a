"""Products of tokens with the matrix of the expert that each goes to, none of them dropped.

Tokens lie in the order of their experts, so each expert multiplies consecutive ones. No sum is made
by atomic additions: what comes back to a token is gathered by the inverse of that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.platform.registry import PLATFORMS


class Order(NamedTuple):
    """How choices, of ``n`` tokens one after the other, lie by expert."""

    places: Tensor
    """``[choices]``: of each place in the new order, which choice is there."""
    back: Tensor
    """The inverse."""
    tokens: Tensor
    """``[choices]``: of each place, whose choice is there."""
    begins: Tensor
    """``[n]``: of each token, which of the choices is its first."""
    ends: Tensor
    """``[experts]`` int32: behind each expert's last place."""

    @property
    def sizes(self) -> Tensor:
        """``[experts]`` int32: choices of each expert."""
        return torch.diff(self.ends, prepend=self.ends.new_zeros(1))


def by_expert(experts: Tensor, tokens: Tensor, begins: Tensor, experts_in_all: int) -> Order:
    """Of chosen ``experts`` ``[choices]``, whose ``tokens`` go up; choices of one expert stay in
    their order. ``begins`` as in the result."""
    places = torch.argsort(experts, stable=True)
    back = torch.empty_like(places)
    back[places] = torch.arange(len(places), device=places.device)
    ends = torch.bincount(experts, minlength=experts_in_all).cumsum(0).to(torch.int32)
    return Order(places, back, tokens[places], begins, ends)


Arriving = Callable[[], Tensor]
"""Call it to wait for rows on their way, and get them."""


class Visit(NamedTuple):
    """Where the choices of tokens, by expert, are computed: behind which place each expert's end
    there, the way there and the way back. What sets out travels beside whatever is computed next.
    """

    ends: Tensor
    """``[own experts]`` int32."""
    there: Callable[[Tensor], Arriving]
    """``[choices, d_model]`` to what is computed here, ``[rows, d_model]``, by expert."""
    back: Callable[[Tensor], Arriving]
    """The inverse."""


def here(ends: Sequence[Tensor]) -> list[Visit]:
    """All experts are here."""
    return [Visit(each, _as_it_is, _as_it_is) for each in ends]


def _as_it_is(x: Tensor) -> Arriving:
    return lambda: x


def cut(rows: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Pieces of so many rows."""
    return [rows] if len(sizes) == 1 else torch.split(rows, list(sizes))


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """The rows of all pieces."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def spread(x: Tensor, order: Order) -> Tensor:
    """``[n, d_model]`` to ``[choices, d_model]``: each token once for every choice, by expert."""
    result: Tensor = _Spread.apply(x, order)  # type: ignore[no-untyped-call]
    return result


def together(y: Tensor, shares: Tensor, order: Order) -> Tensor:
    """The other way: results by expert, times ``shares`` ``[choices]``, added up by token."""
    result: Tensor = _Together.apply(y, shares.to(y.dtype), order)  # type: ignore[no-untyped-call]
    return result


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order) -> Tensor:
        ctx.order = order
        return x[order.tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _by_token(grad, ctx.order), None


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, shares: Tensor, order: Order) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(y, shares)
        return _by_token(y, order, shares)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        order: Order = ctx.order
        y, shares = ctx.saved_tensors
        rows = grad[order.tokens]
        d_shares = torch.linalg.vecdot(rows, y)[order.back]
        return rows.mul_(shares[order.places, None]), d_shares, None


def _by_token(rows: Tensor, order: Order, shares: Tensor | None = None) -> Tensor:
    """What lies by expert, added up by token in the order of its choices, each times its share."""
    return F.embedding_bag(order.back, rows, order.begins, per_sample_weights=shares, mode="sum")


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Each expert's rows of ``x`` times its matrix, transposed: ``[rows, d_out]`` of ``x`` ``[rows,
    d_in]``, ``weight`` ``[experts, d_out, d_in]``. An expert without rows has a zero gradient.

    By PyTorch's own where it has one: on a GPU its loop of products asks for no size on the host,
    and on a processor it is as fast as one of ours (``benchmarks/experts_layer.py``).
    """
    if _has_grouped(x, *weight.shape[1:]):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return one_by_one(x, weight, ends)


def grouped_weight_grad(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Of ``grouped_product``, ``[experts, d_out, d_in]``: zero for an expert without rows."""
    if _has_grouped(x, grad.shape[1], x.shape[1]):
        return F.grouped_mm(grad.T, x, offs=ends)
    made = grad.new_empty(len(ends), grad.shape[1], x.shape[1])
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return _weight_grads(grad, x, sizes, made)


def one_by_one(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``grouped_product`` on any device, in any dtype; asks for every size on the host."""
    result: Tensor = _Loop.apply(x, weight, ends)  # type: ignore[no-untyped-call]
    return result


def _has_grouped(x: Tensor, *widths: int) -> bool:
    """PyTorch takes these: rows of whole 16 bytes on both sides, backward too, and not of fp64."""
    platform = PLATFORMS.get(x.device.type)
    kinds = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    has = platform is not None and platform.has_grouped and kinds
    return has and all(width * x.itemsize % 16 == 0 for width in widths)


class _Loop(torch.autograd.Function):
    """A product an expert, each in its place: nothing is put together afterwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        result = x.new_empty(len(x), weight.shape[1])
        parts = (torch.split(rows, ctx.sizes) for rows in (x, result))
        for own, out, matrix in zip(*parts, weight, strict=True):
            torch.mm(own, matrix.T, out=out)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        d_x = torch.empty_like(x) if needs_x else None
        d_weight = torch.empty_like(weight) if needs_weight else None
        grads = torch.split(grad, ctx.sizes)
        if d_x is not None:
            for own, out, matrix in zip(grads, torch.split(d_x, ctx.sizes), weight, strict=True):
                torch.mm(own, matrix, out=out)
        if d_weight is not None:
            _weight_grads(grad, x, ctx.sizes, d_weight)
        return d_x, d_weight, None


def _weight_grads(grad: Tensor, x: Tensor, sizes: list[int], made: Tensor) -> Tensor:
    parts = (torch.split(rows, sizes) for rows in (grad, x))
    for own, rows, out in zip(*parts, made, strict=True):
        torch.mm(own.T, rows, out=out)  # zero where there are no rows
    return made

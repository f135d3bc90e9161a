"""Pieces on their way while something else computes: begun, and awaited later, as are gradients.

Autograd goes back through operations in the opposite order: what was awaited last is begun first,
and what was begun first is awaited last. So gradients travel beside products as activations did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.comm.comm import Arriving
from weft.parallel.runtime import Change

Start = Callable[[Tensor], Arriving[Tensor]]
"""Starts to change a tensor; what it returns waits for what comes of it."""


class Trip:
    """One piece: how it sets out, and how its gradient does later."""

    def __init__(self, there: Start, back: Start) -> None:
        self._there, self._back = there, back
        self._arriving: Arriving[Tensor] | None = None

    def set_out(self, x: Tensor) -> None:
        """The piece."""
        self._arriving = self._there(x)

    def return_(self, grad: Tensor) -> None:
        """Its gradient."""
        self._arriving = self._back(grad)

    def arrived(self) -> Tensor:
        """What set out last, once it is there."""
        arriving, self._arriving = self._arriving, None
        assert arriving is not None, "nothing set out"
        return arriving()


class Begun(torch.autograd.Function):
    """The piece sets out; backward its gradient arrives. A ticket stands for what is under way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        trip.set_out(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _ticket: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.arrived(), None


class Ended(torch.autograd.Function):
    """The piece arrives; backward its gradient sets out."""

    @staticmethod
    def forward(ctx: Any, _ticket: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return trip.arrived()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.trip.return_(grad)
        return grad.new_empty(0), None


Path = tuple[Start, Start]
"""Of a piece and, the other way, of its gradient."""
Ticket = tuple[Tensor, Trip]


def begin(x: Tensor, path: Path) -> Ticket:
    """A piece sets out."""
    trip = Trip(*path)
    return Begun.apply(x, trip), trip  # type: ignore[no-untyped-call]


def end(ticket: Ticket) -> Tensor:
    """It arrives."""
    piece: Tensor = Ended.apply(*ticket)  # type: ignore[no-untyped-call]
    return piece


Ways = tuple[Callable[[Tensor, Path], Ticket], Callable[[Ticket], Tensor]]
PLAIN: Ways = (begin, end)


def products(
    parts: Iterable[Tensor], coming: Sequence[Path], of: Sequence[Change], ways: Ways
) -> list[list[Tensor]]:
    """Of each piece that comes of these parts, each of several products: the others travel on."""
    begin, end = ways
    tickets = [begin(part, path) for part, path in zip(parts, coming, strict=True)]
    made: list[list[Tensor]] = [[] for _ in of]
    for ticket in tickets:
        piece = end(ticket)
        for each, product in zip(made, of, strict=True):
            each.append(product(piece))
    return made


def through(
    parts: Sequence[Tensor], coming: Sequence[Path], term: Change, going: Sequence[Path], ways: Ways
) -> list[Tensor]:
    """What pieces become: one is computed while others come and go. Without ``coming`` they are
    there."""
    begin, end = ways
    arriving = [begin(part, path) for part, path in zip(parts, coming, strict=False)]
    computed_again = torch._C._current_graph_task_id() != -1
    terms, leaving = [], []
    for number, path in enumerate(going):
        piece = end(arriving[number]) if arriving else parts[number]
        terms.append(term(piece))
        if not computed_again:
            leaving.append(begin(terms.pop(), path))
    if computed_again:  # for a backward, which stops this where it has what it needs
        leaving = [begin(each, path) for each, path in zip(terms, going, strict=True)]
    return [end(ticket) for ticket in leaving]

"""An update of what is kept in host memory or on disk: one piece after another on the device.

A rule that looks at elements alone is given parts of tensors, each rank as many as it has. Others
are given whole ones, all ranks those of the same parameters at the same time, for such rules ask
for sums over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from math import gcd, prod
from operator import attrgetter
from typing import NamedTuple

from torch import Tensor

from weft.memory.belt import Belt, room_bytes
from weft.memory.kept import is_apart
from weft.memory.tiers import ALIGNMENT, PIECE_BYTES
from weft.optim.rule import Group, Update
from weft.parallel.gradients import Gradients


class _Part(NamedTuple):
    """Of a main parameter, what is updated at a time."""

    group: int
    number: int
    """Of the main in its group."""
    rows: slice
    """Along its first dimension."""

    def of(self, tensor: Tensor) -> Tensor:
        return tensor[self.rows] if tensor.ndim else tensor


class PieceByPiece:
    """What an optimizer updates, in pieces; the same ones in every update."""

    def __init__(self, gradients: Gradients, groups: Sequence[Group], *, by_element: bool) -> None:
        self._device = gradients.device
        self._groups = groups
        parts = list(_parts(groups, by_element=by_element))
        self._names: list[list[str]] = []
        """Of parameters, by piece."""
        self._pieces: list[list[_Part]] = []
        self._divide(parts, gradients, by_element=by_element)
        states = [[t for p in piece for t in self._kept(p)] for piece in self._pieces]
        grads = [[t for p in piece for t in self._resting(p)] for piece in self._pieces]
        tensors = [[*kept, *rest] for kept, rest in zip(states, grads, strict=True)]
        self._belt = Belt(self._device, tensors, [*map(len, grads)])

    def _divide(self, parts: list[_Part], gradients: Gradients, *, by_element: bool) -> None:
        """What is updated at a time."""
        if by_element:
            sizes = [room_bytes([*self._kept(part), *self._resting(part)]) for part in parts]
            for run in _runs(sizes):
                self._pieces.append(parts[run])
                self._names.append([])
        else:
            specs = gradients.wholes.specs
            width = gradients.precision.master.dtype.itemsize
            for run in _runs([width * 3 * prod(spec.shape) for spec in specs]):
                names = [spec.name for spec in specs[run]]
                self._names.append(names)
                self._pieces.append([p for p in parts if self._name(p) in names])

    @property
    def rooms(self) -> list[Tensor]:
        """Memory of the device through which pieces come and go."""
        return self._belt.rooms

    def parts_of(self, update: Update) -> Iterator[Update]:
        """Updates that together are one, as a rule is to do them in turn."""
        arrived = self._belt.each()
        for piece, names, tensors in zip(self._pieces, self._names, arrived, strict=True):
            here, rests = iter(tensors), iter(tensors[len(tensors) - self._num_resting(piece) :])
            by_group = groupby(piece, key=attrgetter("group"))
            groups = [self._group(number, list(parts), here, rests) for number, parts in by_group]
            yield replace(update, groups=groups, wholes=update.wholes.of(names))

    def _name(self, part: _Part) -> str:
        return self._groups[part.group].mains[part.number].spec.name

    def _kept(self, part: _Part) -> list[Tensor]:
        """What of a part is not on the device: of its values and states."""
        return [part.of(t) for t in self._tensors(part) if is_apart(t, self._device)]

    def _tensors(self, part: _Part) -> list[Tensor]:
        """Values and states of its main."""
        group = self._groups[part.group]
        value = group.mains[part.number].value.detach()
        return [value, *(states[part.number] for states in group.states.values())]

    def _resting(self, part: _Part) -> list[Tensor]:
        """Its gradient, if that is not on the device either."""
        rests = self._groups[part.group].mains[part.number].rests
        return [] if rests is None else [part.of(rests)]

    def _num_resting(self, parts: Sequence[_Part]) -> int:
        return sum(len(self._resting(part)) for part in parts)

    def _group(
        self,
        number: int,
        parts: Sequence[_Part],
        here: Iterator[Tensor],
        rests: Iterator[Tensor],
    ) -> Group:
        """With what came of it: values and states in ``here``, gradients in ``rests``."""
        whole = self._groups[number]
        mains, states = [], [list[Tensor]() for _ in whole.states]
        for part in parts:
            main = whole.mains[part.number]
            value, *kept = (
                next(here) if is_apart(tensor, self._device) else part.of(tensor)
                for tensor in self._tensors(part)
            )
            grad = None if main.grad is None else part.of(main.grad)
            grad = grad if main.rests is None else next(rests)
            mains.append(replace(main, value=value, grad=grad))
            for found, state in zip(states, kept, strict=True):
                found.append(state)
        return replace(whole, mains=mains, states=dict(zip(whole.states, states, strict=True)))


def _parts(groups: Sequence[Group], *, by_element: bool) -> Iterator[_Part]:
    """Of every main parameter: all of it, or rows of so many elements that instructions on several
    meet the same ones as in the whole."""
    for number, group in enumerate(groups):
        for place, main in enumerate(group.mains):
            if not by_element:
                yield _Part(number, place, slice(None))
                continue
            rows, inner = [*main.value.shape, 1][0], max(prod(main.value.shape[1:]), 1)
            tensors = 1 + len(group.states) + (main.rests is not None)
            width = main.value.element_size() * tensors * inner
            unit = ALIGNMENT // gcd(ALIGNMENT, inner)
            step = max(PIECE_BYTES // (width * unit), 1) * unit
            for first in range(0, rows, step):
                yield _Part(number, place, slice(first, first + step))


def _runs(sizes: Sequence[int]) -> list[slice]:
    """Consecutive ones that together are no larger than a piece, or one each."""
    found, first, total = [], 0, 0
    for number, size in enumerate(sizes):
        if number > first and total + size > PIECE_BYTES:
            found.append(slice(first, number))
            first, total = number, 0
        total += size
    return [*found, slice(first, len(sizes))]

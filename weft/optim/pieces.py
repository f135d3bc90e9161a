"""An update of what is kept in host memory or on disk: one piece after another on the device.

A rule that looks at elements alone is given parts of tensors, each rank as many as it has. Others
are given whole ones, all ranks those of the same parameters at the same time, for such rules ask
for sums over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
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
        if by_element:
            for run in _runs([room_bytes(self._kept(part)) for part in parts]):
                self._pieces.append(parts[run])
                self._names.append([])
        else:
            specs = gradients.wholes.specs
            width = gradients.precision.master.dtype.itemsize
            for run in _runs([width * 3 * prod(spec.shape) for spec in specs]):
                names = [spec.name for spec in specs[run]]
                self._names.append(names)
                self._pieces.append([p for p in parts if self._name(p) in names])
        tensors = [[t for p in piece for t in self._kept(p)] for piece in self._pieces]
        self._belt = Belt(self._device, tensors)

    @property
    def rooms(self) -> list[Tensor]:
        """Memory of the device through which pieces come and go."""
        return self._belt.rooms

    def parts_of(self, update: Update) -> Iterator[Update]:
        """Updates that together are one, as a rule is to do them in turn."""
        arrived = self._belt.each()
        for piece, names, tensors in zip(self._pieces, self._names, arrived, strict=True):
            here = iter(tensors)
            by_group = groupby(piece, key=attrgetter("group"))
            groups = [self._group(number, list(parts), here) for number, parts in by_group]
            yield replace(update, groups=groups, wholes=update.wholes.of(names))

    def _name(self, part: _Part) -> str:
        return self._groups[part.group].mains[part.number].spec.name

    def _kept(self, part: _Part) -> list[Tensor]:
        """What of a part is not on the device: its values, where they are a copy, and states."""
        group = self._groups[part.group]
        states = [part.of(states[part.number]) for states in group.states.values()]
        value = group.mains[part.number].value.detach()
        return [part.of(value)] * is_apart(value, self._device) + states

    def _group(self, number: int, parts: Sequence[_Part], here: Iterator[Tensor]) -> Group:
        """With what came of it."""
        whole = self._groups[number]
        mains, states = [], [list[Tensor]() for _ in whole.states]
        for part in parts:
            main = whole.mains[part.number]
            apart = is_apart(main.value, self._device)
            value = next(here) if apart else part.of(main.value.detach())
            grad = None if main.grad is None else part.of(main.grad)
            mains.append(replace(main, value=value, grad=grad))
            for found, state in zip(states, islice(here, len(states)), strict=True):
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
            width = main.value.element_size() * (1 + len(group.states)) * inner
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

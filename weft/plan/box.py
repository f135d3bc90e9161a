"""Half-open index boxes of a global tensor: the one way Weft says which elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import add, sub


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements ``offset[d] <= i[d] < offset[d] + size[d]`` of a tensor. Integers only."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.offset) == len(self.size), f"offset {self.offset} and size {self.size}"
        assert min(self.offset, default=0) >= 0, f"negative offset {self.offset}"
        assert min(self.size, default=0) >= 0, f"negative size {self.size}"

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """The box of every element of a tensor of this shape."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def end(self) -> tuple[int, ...]:
        """The first index past the box, by dimension."""
        return tuple(map(add, self.offset, self.size))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for the box of a scalar."""
        return prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """The common elements, or None where there are none."""
        assert len(self.size) == len(other.size), f"boxes of unlike rank: {self}, {other}"
        low = tuple(map(max, self.offset, other.offset))
        size = tuple(map(sub, map(min, self.end, other.end), low))
        return Box(low, size) if min(size, default=1) > 0 else None

    def contains(self, other: Box) -> bool:
        """Every element of ``other`` is in this box. False for an ``other`` without elements."""
        if self == other:
            return other.numel > 0
        return self.intersect(other) == other

    def within(self, holder: Box) -> Box:
        """This box in the coordinates of a local tensor that stores ``holder``."""
        assert holder.contains(self), f"{self} is not inside {holder}"
        offset = tuple(a - b for a, b in zip(self.offset, holder.offset, strict=True))
        return Box(offset, self.size)

    def slices(self) -> tuple[slice, ...]:
        """Index of this box into a tensor that stores the whole shape."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.size, strict=True))

    def stretch(self, start: int, stop: int) -> list[Box]:
        """Boxes of the elements ``start <= i < stop`` of this box in row-major order, in order.

        Each is a stretch itself: what a rank holds of a flattened tensor.
        """
        assert 0 <= start <= stop <= self.numel, f"[{start}, {stop}) of {self}"
        if start == stop:
            return []
        if stop - start == self.numel:
            return [self]
        row = self.numel // self.size[0]
        first, last = -(-start // row), stop // row
        if first > last:  # inside one row
            return self._rows(last, last + 1)._inner(start - last * row, stop - last * row)
        boxes = [self._rows(first, last)] if first < last else []
        if start % row:
            boxes = self._rows(first - 1, first)._inner(start % row, row) + boxes
        if stop % row:
            boxes += self._rows(last, last + 1)._inner(0, stop % row)
        return boxes

    def _rows(self, low: int, high: int) -> Box:
        """Indices ``low`` to ``high - 1`` of the first dimension, counted from the box's start."""
        offset = (self.offset[0] + low, *self.offset[1:])
        return Box(offset, (high - low, *self.size[1:]))

    def _inner(self, start: int, stop: int) -> list[Box]:
        """A stretch of a box of one row."""
        rest = Box(self.offset[1:], self.size[1:]).stretch(start, stop)
        return [Box((self.offset[0], *b.offset), (1, *b.size)) for b in rest]

    def subtract(self, other: Box) -> list[Box]:
        """Disjoint boxes that cover the elements of this box that ``other`` lacks."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.numel else []
        rest: list[Box] = []
        offset, size = list(self.offset), list(self.size)
        for d in range(len(size)):
            below = common.offset[d] - offset[d]
            above = offset[d] + size[d] - common.end[d]
            if below:
                rest.append(Box(tuple(offset), (*size[:d], below, *size[d + 1 :])))
            if above:
                start = (*offset[:d], common.end[d], *offset[d + 1 :])
                rest.append(Box(start, (*size[:d], above, *size[d + 1 :])))
            offset[d], size[d] = common.offset[d], common.size[d]
        return rest

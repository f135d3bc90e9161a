"""A named grid of ranks. An argument, never a global."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, starmap
from math import prod

from weft.config.axes import ENTRIES, INNER_AXES, SAMPLE_AXES
from weft.plan.tiling import part_of, split_by_weight

AXES = tuple(entry.name for entry in ENTRIES)
"""Outermost first by default; a mesh may name them in another order (placement only)."""
EXPERT_AXIS, WIDTH_AXIS = (
    next(entry.name for entry in ENTRIES if entry.divides == what) for what in ("expert", "width")
)
"""Those that divide experts, and widths of modules."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """``ranks`` laid out row-major over ``axes``, the last axis fastest.

    ``axes`` are (name, size) pairs, each of ``AXES`` at most once; an absent axis has size 1.
    """

    ranks: tuple[int, ...]
    axes: tuple[tuple[str, int], ...] = ()
    unlike: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """By axis: weights of what each place along it has of what it divides unlike the rest."""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        assert set(names) <= set(AXES) and len(set(names)) == len(names), f"axes {self.axes}"
        assert all(size >= 1 for _, size in self.axes), f"size below 1 in {self.axes}"
        assert prod(size for _, size in self.axes) == len(self.ranks), f"{self.axes}: {self.ranks}"
        assert len(set(self.ranks)) == len(self.ranks), f"rank twice in {self.ranks}"

    @staticmethod
    def of(ranks: range | tuple[int, ...], **axes: int) -> Mesh:
        """``Mesh.of(range(4), dp=2, tp=2)``: axes outermost first, as they are written."""
        return Mesh(tuple(ranks), tuple(axes.items()))

    def size(self, axis: str) -> int:
        """Ranks along ``axis``; 1 where the mesh does not name it."""
        return dict(self.axes).get(axis, 1)

    def shares(self, axis: str) -> tuple[int, ...]:
        """Weights of what each place along an axis has of what it divides unlike the rest; empty:
        alike."""
        return next((weights for name, weights in self.unlike if name == axis), ())

    def with_shares(self, **shares: Sequence[int]) -> Mesh:
        """The same with such weights by axis, of those that say any: ``ep=(3, 1)``."""
        said = {**dict(self.unlike), **{name: tuple(each) for name, each in shares.items()}}
        return replace(self, unlike=tuple((name, each) for name, each in said.items() if each))

    @property
    def words(self) -> tuple[str, ...]:
        """Of each axis that has several places, and of unlike parts: ``tp 2 (3:1)``."""
        by = {name: f" ({':'.join(map(str, shares))})" for name, shares in self.unlike}
        return tuple(f"{name} {size}{by.get(name, '')}" for name, size in self.axes if size > 1)

    @property
    def sample_ways(self) -> int:
        """Parts into which the samples of a microbatch are divided."""
        return prod(self.size(axis) for axis in SAMPLE_AXES)

    @property
    def model_axes(self) -> tuple[str, ...]:
        """Its axes along which ranks compute the same samples."""
        return tuple(axis for axis, size in self.axes if size > 1 and axis not in SAMPLE_AXES)

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """Its axes along which ranks talk inside modules."""
        return tuple(axis for axis, size in self.axes if size > 1 and axis in INNER_AXES)

    @property
    def spans_samples(self) -> bool:
        """Ranks with other samples talk inside modules."""
        return any(axis in SAMPLE_AXES for axis in self.inner_axes)

    def split_samples(self, size: int, shares: Sequence[int] = ()) -> dict[int, range]:
        """Which of ``size`` samples each rank computes: consecutive parts.

        ``shares``: their weights by place along the axes that divide samples, the last fastest;
        none: as even as they go.
        """
        if not shares:
            return {rank: self.part(size, rank, SAMPLE_AXES) for rank in self.ranks}
        parts = list(starmap(range, pairwise(accumulate([0, *split_by_weight(size, shares)]))))
        return {rank: parts[self.sample_place(rank)] for rank in self.ranks}

    def sample_place(self, rank: int) -> int:
        """Number of the part of the samples that a rank computes."""
        position, place = self.coordinate(rank), 0
        for axis in SAMPLE_AXES:
            place = place * self.size(axis) + position[axis]
        return place

    def part(self, size: int, rank: int, axes: Iterable[str]) -> range:
        """Which of ``size`` elements a rank has, where each axis cuts what the one before left."""
        position, mine = self.coordinate(rank), range(size)
        for axis in axes:
            part = part_of(len(mine), self.size(axis), position[axis])
            mine = mine[part.start : part.stop]
        return mine

    def is_first_with_samples(self, rank: int) -> bool:
        """The rank is the first of those that compute the same samples."""
        position = self.coordinate(rank)
        return not any(position[axis] for axis in AXES if axis not in SAMPLE_AXES)

    def coordinate(self, rank: int) -> Mapping[str, int]:
        """Position of ``rank`` on every axis, absent axes included as 0."""
        index = rank - self.ranks[0]  # where they are consecutive
        if not 0 <= index < len(self.ranks) or self.ranks[index] != rank:
            index = self.ranks.index(rank)
        result = dict.fromkeys(AXES, 0)
        for name, size in reversed(self.axes):
            index, result[name] = divmod(index, size)
        return result

    def rank_at(self, **coordinate: int) -> int:
        """The rank at a position; axes left out are at 0."""
        index = 0
        for name, size in self.axes:
            index = index * size + coordinate.get(name, 0)
        return self.ranks[index]

    def groups(self, axis: str) -> Iterator[tuple[int, ...]]:
        """The ranks along ``axis``, one tuple for each position on the other axes."""
        names = [name for name, _ in self.axes]
        inner = prod(n for _, n in self.axes[names.index(axis) + 1 :]) if axis in names else 1
        block = self.size(axis) * inner
        for start in range(0, len(self.ranks), block):
            for first in range(start, start + inner):
                yield self.ranks[first : start + block : inner]

"""Where one global tensor lives, and the moves that turn one placement into another.

The only resharding mechanism of Weft: activations over a stage border, checkpoints, live migration
and gradient reduction across unlike pipelines are all intersections of two tilings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from weft.plan.box import Box


@dataclass(frozen=True)
class Tiling:
    """Which boxes of a tensor of ``shape`` every rank holds. Equal boxes are replicas.

    Boxes may be uneven, a rank may hold several that have no element in common, and one that is
    absent holds nothing.
    """

    shape: tuple[int, ...]
    boxes: Mapping[int, tuple[Box, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        whole = Box.whole(self.shape)
        for rank, boxes in self.boxes.items():
            for n, box in enumerate(boxes):
                inside = whole.contains(box) or not box.numel
                assert inside, f"rank {rank}: {box} outside {self.shape}"
                twice = [other for other in boxes[:n] if box.intersect(other) is not None]
                assert not twice, f"rank {rank}: {box} overlaps {twice}"

    def holders(self, box: Box) -> list[int]:
        """Ranks, ascending, that hold every element of ``box`` in one of theirs."""
        return sorted(
            rank for rank, boxes in self.boxes.items() if any(held.contains(box) for held in boxes)
        )

    def distinct(self) -> list[Box]:
        """The boxes that some rank holds, each once, in order."""
        return sorted({box for boxes in self.boxes.values() for box in boxes})

    def uncovered(self) -> list[Box]:
        """Boxes of the elements that no rank holds; empty for a complete tiling."""
        missing = [Box.whole(self.shape)]
        for box in self.distinct():
            missing = [part for piece in missing for part in piece.subtract(box)]
        return missing


class Stored:
    """Where the boxes of one rank are in the one local tensor that stores them.

    Along each dimension the local tensor has the boxes' ranges one after the other, in the order
    in which the boxes name them; the boxes are every combination of these ranges.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        assert boxes, "a rank that holds nothing stores nothing"
        self.boxes = tuple(boxes)
        self._starts: list[dict[tuple[int, int], int]] = []
        sizes = []
        for ranges in zip(*(zip(b.offset, b.size, strict=True) for b in boxes), strict=True):
            starts: dict[tuple[int, int], int] = {}
            end = 0
            for offset, size in dict.fromkeys(ranges):
                starts[offset, size] = end
                end += size
            self._starts.append(starts)
            sizes.append(end)
        assert prod(map(len, self._starts)) == len(set(boxes)) == len(boxes), f"no grid: {boxes}"
        self.size = tuple(sizes)
        """Shape of the local tensor."""

    @staticmethod
    def whole(shape: Sequence[int]) -> Stored:
        """All of a tensor."""
        return Stored([Box.whole(shape)])

    @property
    def numel(self) -> int:
        """Elements of the local tensor."""
        return prod(self.size)

    def contains(self, box: Box) -> bool:
        """Every element of ``box`` is in one of the rank's."""
        return any(held.contains(box) for held in self.boxes)

    def slices(self, box: Box) -> tuple[slice, ...]:
        """Index of ``box``, which is inside one of the rank's, into the local tensor."""
        holder = next((held for held in self.boxes if held.contains(box)), None)
        assert holder is not None, f"{box} is in none of {self.boxes}"
        ranges = zip(holder.offset, holder.size, strict=True)
        starts = [of[key] for of, key in zip(self._starts, ranges, strict=True)]
        low = [s + a - b for s, a, b in zip(starts, box.offset, holder.offset, strict=True)]
        return tuple(slice(o, o + n) for o, n in zip(low, box.size, strict=True))


class Move(NamedTuple):
    """Copy ``box`` (global indices) from one rank to another; ``src == dst`` is a local copy."""

    src: int
    dst: int
    box: Box


def moves(
    source: Tiling,
    target: Tiling,
    distance: Callable[[int, int], int] = lambda src, dst: abs(src - dst),
) -> list[Move]:
    """The copies that turn ``source`` into ``target``.

    Every element that a rank of ``target`` needs arrives there once, from the nearest rank that
    holds it (itself first; ties go to the lower rank). Ordered by destination, source and box.

    Raises:
        ValueError: an element of ``target`` has no holder in ``source``.
    """
    assert source.shape == target.shape, f"shapes differ: {source.shape}, {target.shape}"
    result: list[Move] = []
    for dst, wanted in sorted(target.boxes.items()):
        missing = [box for box in wanted if box.numel]
        for src in sorted(source.boxes, key=lambda src: (src != dst, distance(src, dst), src)):
            if not missing:
                break
            for given in source.boxes[src]:
                found = (box.intersect(given) for box in missing)
                result += [Move(src, dst, common) for common in found if common is not None]
                missing = [part for box in missing for part in box.subtract(given)]
        if missing:
            raise ValueError(f"no rank holds {missing[0]} of shape {source.shape}")
    return sorted(result, key=lambda move: (move.dst, move.src, move.box))


class Piece(NamedTuple):
    """A box whose elements are all held by the same ranks."""

    box: Box
    ranks: tuple[int, ...]


def refine(tiling: Tiling) -> list[Piece]:
    """The common refinement: disjoint pieces, each with every rank that holds it.

    Ranks whose boxes overlap only in part (stages split two ways and three ways, say) share just
    the overlap, so a reduction over each piece's ranks adds every element exactly once.
    """
    pieces: list[Box] = []
    for box in tiling.distinct():
        if box.numel:
            pieces = _split(pieces, box)
    return sorted(Piece(box, tuple(tiling.holders(box))) for box in pieces)


def _split(pieces: Iterable[Box], new: Box) -> list[Box]:
    """Cut ``pieces`` along ``new`` and add what they do not cover."""
    result: list[Box] = []
    fresh = [new]
    for piece in pieces:
        common = piece.intersect(new)
        result += [common, *piece.subtract(common)] if common is not None else [piece]
        fresh = [part for box in fresh for part in box.subtract(piece)]
    return result + fresh


def split_evenly(total: int, parts: int) -> list[int]:
    """Sizes of ``parts`` consecutive shares of ``total``; the first ones get the remainder."""
    return split_by_weight(total, [1] * parts)


def part_of(size: int, parts: int, number: int) -> range:
    """The ``number``-th of ``parts`` consecutive, as even as possible parts of ``size``."""
    sizes = split_evenly(size, parts)
    start = sum(sizes[:number])
    return range(start, start + sizes[number])


def split_by_weight(total: int, weights: Sequence[int]) -> list[int]:
    """Integer shares of ``total`` in proportion to ``weights``, off by less than one each.

    Largest remainder (Hamilton); ties go to the earlier share. The shares add up to ``total``.
    """
    whole = sum(weights)
    assert whole > 0, f"weights {weights} add up to nothing"
    shares = [total * weight // whole for weight in weights]
    order = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for i in order[: total - sum(shares)]:
        shares[i] += 1
    return shares

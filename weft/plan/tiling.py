"""Where one global tensor lives, and the moves that turn one placement into another.

The only resharding mechanism of Weft: activations across a seam, checkpoints, live migration and
gradient reduction across unlike pipelines are all intersections of two tilings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.plan.box import Box


@dataclass(frozen=True)
class Tiling:
    """Which box of a tensor of ``shape`` every rank holds. Equal boxes are replicas.

    Boxes may be uneven; a rank that is absent holds nothing.
    """

    shape: tuple[int, ...]
    boxes: Mapping[int, Box] = field(default_factory=dict)

    def __post_init__(self) -> None:
        whole = Box.whole(self.shape)
        for rank, box in self.boxes.items():
            assert whole.contains(box) or not box.numel, f"rank {rank}: {box} outside {self.shape}"

    def holders(self, box: Box) -> list[int]:
        """Ranks, ascending, that hold every element of ``box``."""
        return sorted(rank for rank, held in self.boxes.items() if held.contains(box))

    def uncovered(self) -> list[Box]:
        """Boxes of the elements that no rank holds; empty for a complete tiling."""
        missing = [Box.whole(self.shape)]
        for box in sorted(set(self.boxes.values())):
            missing = [part for piece in missing for part in piece.subtract(box)]
        return missing


class Move(NamedTuple):
    """Copy ``box`` (global indices) from one rank to another; ``src == dst`` is a local copy."""

    src: int
    dst: int
    box: Box


def by_rank_distance(src: int, dst: int) -> int:
    """How far two ranks are apart when nothing is known about links."""
    return abs(src - dst)


def moves(
    source: Tiling, target: Tiling, distance: Callable[[int, int], int] = by_rank_distance
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
        missing = [wanted] if wanted.numel else []
        near = sorted(source.boxes, key=lambda src: (src != dst, distance(src, dst), src))
        for src in near:
            found = [(box, box.intersect(source.boxes[src])) for box in missing]
            result += [Move(src, dst, common) for _, common in found if common is not None]
            missing = [part for box, common in found for part in _rest(box, common)]
        if missing:
            raise ValueError(f"no rank holds {missing[0]} of shape {source.shape}")
    return sorted(result, key=lambda move: (move.dst, move.src, move.box))


def _rest(box: Box, common: Box | None) -> list[Box]:
    return [box] if common is None else box.subtract(common)


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
    for box in sorted(set(tiling.boxes.values())):
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

"""Who sends which elements of outer gradients to whom: moves between the owners of two sites.

Inside a site every element of a parameter has one owner. Owners in any two sites send each other
what both have in common, so each element crosses once in each direction, however unlike the sites'
plans are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

from weft.plan.box import Box
from weft.plan.tiling import Tiling, moves

Owned = Mapping[str, Sequence[Box]]
"""By name: the boxes that a rank owns."""


class Trade(NamedTuple):
    """Elements of a parameter that one rank sends to one of another site."""

    src: int
    dst: int
    name: str
    box: Box


def trades(
    shapes: Mapping[str, tuple[int, ...]],
    owned: Sequence[Owned],
    sites: Sequence[Sequence[int]],
) -> Iterator[Trade]:
    """All of a meeting, in one order; ``owned``: by rank.

    Raises:
        ValueError: a site lacks some element.
    """
    for name, shape in shapes.items():
        tilings = [
            Tiling(shape, {rank: tuple(owned[rank].get(name, ())) for rank in site})
            for site in sites
        ]
        for source, target in permutations(tilings, 2):
            yield from (Trade(m.src, m.dst, name, m.box) for m in moves(source, target))

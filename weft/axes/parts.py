"""Consecutive parts of a dimension: what most axes cut."""

from __future__ import annotations

from weft.plan.layout import Dim
from weft.plan.tiling import part_of


def divisible(dim: Dim, ways: int) -> bool:
    """Every part gets something, no unit is cut, and groups are cut into equal numbers of units."""
    groups = dim.num_groups
    if ways <= groups:
        return True
    if not groups or ways % groups:
        return False
    return dim.shared or dim.units % (ways // groups) == 0


def consecutive(dim: Dim, ways: int, position: int) -> range:
    """The ``position``-th of ``ways`` parts: whole groups as evenly as they go, or with more parts
    than groups an equal number of units of one. Where there is too little the last are empty."""
    groups = max(1, dim.num_groups)
    width = dim.size // groups
    if ways > groups and divisible(dim, ways):
        several = ways // groups
        if not dim.shared:
            own = dim.size // ways
            return range(position * own, (position + 1) * own)
        group = position // several
        return range(group * width, (group + 1) * width)
    mine = part_of(dim.num_groups, ways, position)
    return range(mine.start * width, mine.stop * width)

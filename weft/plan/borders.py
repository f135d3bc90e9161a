"""Where stages begin and end: before a layer, or between the two parts of one.

A place is a number: 3 is before layer 3, and 3.5 inside it, where its first part has been added to
what travels and its second has not. A family says whether its layers have parts
(``Family.parts``); what crosses inside a layer is what crosses between two.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise, permutations
from math import ceil, floor

Place = float
"""A whole number of layers, or a half more."""
Layers = tuple[Place, Place]
"""Half-open."""
INSIDE = 0.5
"""How far behind the beginning of a layer its second part begins."""


def is_place(value: object) -> bool:
    """It is a number that a border may be at, whatever the model."""
    return type(value) in (int, float) and value % INSIDE == 0  # type: ignore[operator]


def place(number: float) -> Place:
    """The same number, as plans write it: without a fraction where it is whole."""
    return int(number) if number % 1 == 0 else number


def blocks(layers: Layers) -> range:
    """Numbers of the layers that are held, at least in part."""
    first, end = layers
    return range(floor(first), ceil(end)) if first < end else range(0)


def crossed(num_chained: int, num_heads: int) -> list[tuple[int, int]]:
    """Between which stages something crosses, from the first to the second: from each to the next,
    from the last of these to each part of the head after them, and from each part to the others."""
    heads = range(num_chained, num_chained + num_heads)
    fan = [(num_chained - 1, part) for part in heads]
    return [*pairwise(range(num_chained)), *fan, *permutations(heads, 2)]


def in_parts(layers: Layers, cuts: Collection[Place] = ()) -> list[Layers]:
    """What is held of each of them; ``cuts``: places at which to part one that is whole, too."""
    first, end = layers
    inside = {n for n in (*blocks(layers), *cuts) if first < n < end}
    return list(pairwise(sorted({first, *inside, end})))

"""The machines of a plan, as whatever starts it sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

PORT = 29400
"""Of the first machine, where all others meet."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One node, and the ranks it runs."""

    chips: str
    """``8 x H100-SXM5-80GB``."""
    first: int
    """Of its ranks."""
    num_ranks: int
    host: str
    """Empty where nobody said it."""
    has_cards: bool


def alike(machines: Sequence[Machine]) -> list[list[Machine]]:
    """Neighbours that have the same chips and as many ranks together."""
    kinds = groupby(machines, key=lambda each: (each.chips, each.num_ranks))
    return [list(same) for _, same in kinds]

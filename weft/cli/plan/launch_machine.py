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
    pool: int
    """Number of its pool in the cluster, which says where it is and how it is connected."""
    named: int = 0
    """Which of those whose hosts were named together, if they were."""


def alike(machines: Sequence[Machine]) -> list[list[Machine]]:
    """Neighbours of one pool with as many ranks, which may be any of its nodes, or of those that
    were named together."""
    kinds = groupby(machines, key=lambda each: (each.pool, each.named, each.chips, each.num_ranks))
    return [list(same) for _, same in kinds]

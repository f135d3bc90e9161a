"""Which rank sums which elements of a bucket over domains, and who sends what: arithmetic.

Every domain has a whole bucket in segments, one for each of its ranks, and domains need not have
as many. Where no segment ends, one rank of each domain has the same elements: a cell. Each domain
sums its part of every cell, so that all send and receive alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from weft.plan.tiling import split_evenly

GRAIN = 8
"""Elements: parts begin where messages in two bytes are aligned to 16."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Consecutive elements of a bucket that one rank of each domain has."""

    ranks: tuple[int, ...]
    """By domain."""
    parts: tuple[range, ...]
    """Places in the bucket that each of them sums; a range may be empty."""


def segment_of(numel: int, ranks: int, align: int = 1) -> int:
    """Elements of each of so many equal segments that together have room for ``numel``."""
    return -(-numel // (ranks * align)) * align


def cells(numel: int, domains: Sequence[Sequence[int]], align: int = 1) -> Iterator[Cell]:
    """The cells of a bucket in order; what lies behind its ``numel`` elements is in none.

    ``domains``: the ranks of each, in the order of their segments; ``align``: of these.
    """
    segments = [segment_of(numel, len(ranks), align) for ranks in domains]
    ends = {0, numel}
    for segment, ranks in zip(segments, domains, strict=True):
        ends.update(min(n * segment, numel) for n in range(1, len(ranks)))
    for low, high in pairwise(sorted(ends)):
        owners = [ranks[low // each] for each, ranks in zip(segments, domains, strict=True)]
        yield Cell(tuple(owners), tuple(_parts(low, high, len(domains))))


def _parts(low: int, high: int, number: int) -> Iterator[range]:
    for grains in split_evenly(-(-(high - low) // GRAIN), number):
        middle = min(low + grains * GRAIN, high)
        yield range(low, middle)
        low = middle


def sent_by(domain: int, every: Sequence[Cell]) -> int:
    """Elements that the ranks of a domain send to others: terms that those sum, and its own sums.

    Close to 2 (k - 1) / k of the bucket with k domains, and as many come in.
    """
    return sum(
        sum(map(len, cell.parts)) + (len(cell.parts) - 2) * len(cell.parts[domain])
        for cell in every
    )

"""Which rank sums which elements of a bucket over domains, and who sends what: arithmetic.

Every domain has a whole bucket in segments, one for each of its ranks, and domains need not have
as many. Where no segment ends, one rank of each domain has the same elements: a cell. Each domain
sums its part of every cell, so that all send and receive alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from weft.plan.tiling import split_by_weight, split_evenly

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


def segments_of(
    numel: int, ranks: int, align: int = 1, shares: Sequence[int] = ()
) -> tuple[int, ...]:
    """Elements of each rank's segment of what together has room for ``numel``: equal ones, or with
    ``shares`` in proportion to these weights, where 0 has none."""
    if len({*shares}) < 2:
        return (segment_of(numel, ranks, align),) * ranks
    return tuple(each * align for each in split_by_weight(-(-numel // align), shares))


def cells(
    numel: int, domains: Sequence[Sequence[int]], segments: Sequence[Sequence[int]]
) -> Iterator[Cell]:
    """The cells of a bucket in order; what lies behind its ``numel`` elements is in none.

    ``domains``: the ranks of each, in the order of their ``segments``.
    """
    starts = [[0, *accumulate(sizes)] for sizes in segments]
    ends = {0, numel, *(min(start, numel) for each in starts for start in each)}
    for low, high in pairwise(sorted(ends)):
        owners = [
            ranks[bisect_right(each, low) - 1] for each, ranks in zip(starts, domains, strict=True)
        ]
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

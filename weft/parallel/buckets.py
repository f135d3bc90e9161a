"""Which pieces of parameters travel together, and which part of them each rank keeps: arithmetic.

A bucket is a flat buffer: its pieces one behind the other, each at an aligned place, and as long as
is needed to cut it into segments, one for each rank that holds the pieces, or that does so in one
domain: equal ones, or in proportion to what the plan lets each keep, be it nothing. With ZeRO
(arXiv 1910.02054) each rank keeps the segment of its number: its gradients, its optimizer state,
and at level 3 its parameters. A segment may begin and end inside a piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from weft.parallel.crossing import Cell, cells, segments_of
from weft.parallel.params import Held
from weft.plan.box import Box
from weft.plan.plan import ZeroLevel
from weft.precision.roles import Tier

ALIGN = 64
"""Elements: 256 bytes in fp32, as vector instructions and copies of accelerators like it."""
BUCKET_BYTES = 8 * 2**20
"""Enough to hide the latency of a reduction, small enough that the first one starts early."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece in a bucket, or what a segment has of one."""

    held: Held
    box: Box
    """In global indices."""
    start: int
    """Its first element's place in the bucket."""

    @property
    def stop(self) -> int:
        return self.start + self.box.numel


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces with the same holders, level and unit, in the order in which backward meets them."""

    entries: tuple[Stretch, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.entries[0].held.ranks

    @property
    def level(self) -> ZeroLevel:
        return self.entries[0].held.level

    @property
    def reduces_each_backward(self) -> bool:
        """From level 2 on no rank keeps whole gradients from one backward to the next.

        Only where all holders, or those of each domain, are one stage's: they alone do their
        backwards in the same order.
        """
        return self.level >= 2 and self.entries[0].held.in_one_stage

    @property
    def in_one_precision(self) -> bool:
        """All holders compute with all of it in the same dtype."""
        return all(entry.held.in_one_precision for entry in self.entries)

    @property
    def tier(self) -> Tier:
        """Where all of it is kept."""
        return self.entries[0].held.tier

    @property
    def is_rounded(self) -> bool:
        """It is gathered in eight bits."""
        return bool(self.level and self.entries[0].held.rounding)

    @property
    def domains(self) -> tuple[tuple[int, ...], ...]:
        """Its ranks by domain; each has the whole bucket."""
        return self.entries[0].held.by_domain

    @property
    def crosses(self) -> bool:
        """It is summed inside domains, and then between them."""
        return len(self.domains) > 1

    @property
    def is_late(self) -> bool:
        """It is summed inside domains over both ends of a pipeline, one of which completes it last:
        begun before, sums of one group would wait behind each other, and other calls behind them.
        """
        return self.crosses and any(
            each.held.spec.also and not each.held.in_one_stage for each in self.entries
        )

    @property
    def is_cut(self) -> bool:
        """Ranks of a domain have a segment each, if only while it is summed."""
        return self.level > 0 or self.crosses or self.is_cast

    @property
    def is_cast(self) -> bool:
        """Gradients are rounded on their way among ranks of one domain."""
        return bool(self.entries[0].held.reduction)

    def near(self, rank: int) -> tuple[int, ...]:
        """The ranks that are in one domain with ``rank``, this one among them."""
        return self.entries[0].held.near(rank)

    def segments(self, rank: int) -> tuple[int, ...]:
        """Elements of the segment of each rank that is ``near``."""
        held = self.entries[0].held
        near = held.near(rank)
        return segments_of(self.entries[-1].stop, len(near), ALIGN, held.shares_of(near))

    def segment(self, rank: int) -> int:
        """Elements of that of ``rank``."""
        return self.segments(rank)[self.near(rank).index(rank)]

    def numel(self, rank: int) -> int:
        """Elements in the domain of ``rank``, room behind the last one included."""
        return sum(self.segments(rank)) if self.is_cut else self.entries[-1].stop

    def first(self, rank: int) -> int:
        """Where the segment of ``rank`` begins."""
        place = self.near(rank).index(rank)
        return sum(self.segments(rank)[:place]) if self.is_cut else 0

    def cells(self) -> Iterator[Cell]:
        """Who sums what between domains."""
        segments = [self.segments(near[0]) for near in self.domains]
        return cells(self.entries[-1].stop, self.domains, segments)

    def cells_of(self, rank: int) -> Iterator[Cell]:
        """Those that ``rank`` takes part in."""
        return (cell for cell in self.cells() if rank in cell.ranks)

    def kept(self, rank: int) -> Iterator[Stretch]:
        """What lies in the segment of ``rank``; where each keeps all of it, everything."""
        low = self.first(rank) if self.level else 0
        high = low + (self.segment(rank) if self.level else self.numel(rank))
        for entry in self.entries:
            start, stop = max(low, entry.start), min(high, entry.stop)
            if start < stop:
                for box in entry.box.stretch(start - entry.start, stop - entry.start):
                    yield Stretch(entry.held, box, start)
                    start += box.numel

    def kept_views(self, rank: int, memory: Tensor) -> list[Tensor]:
        """Of what is kept, in the flat ``memory`` where the rank keeps it."""
        low = self.first(rank) if self.level else 0
        kept = self.kept(rank)
        return [memory[each.start - low : each.stop - low].view(each.box.size) for each in kept]


def _aligned(elements: int) -> int:
    return -(-elements // ALIGN) * ALIGN


def fill_buckets(
    pieces: Iterable[Held], itemsize: int, bucket_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """Pack pieces, given in forward order, last first: backward meets them so.

    Ranks that hold the same pieces make the same buckets of them, in the same order. A unit of
    level 3 is one bucket, for it is gathered as a whole, or two where some of it is rounded before.
    """
    packed: dict[tuple[object, ...], list[list[Stretch]]] = {}
    for held in reversed(list(pieces)):
        unit = held.spec.unit if held.level == 3 else None
        key = (held.ranks, held.level, unit, held.shares, held.rounding, held.reduction, held.tier)
        groups = packed.setdefault(key, [[]])
        start = _aligned(groups[-1][-1].stop) if groups[-1] else 0
        if start and held.level < 3 and (start + held.box.numel) * itemsize > bucket_bytes:
            groups.append([])
            start = 0
        groups[-1].append(Stretch(held, held.box, start))
    return [Bucket(tuple(entries)) for groups in packed.values() for entries in groups]

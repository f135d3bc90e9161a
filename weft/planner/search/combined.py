"""Sections of several kinds of chip for one microbatch: all their combinations at once.

There are many thousands, of which few become frames, so that they are columns of arrays, in the
order of ``product``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.planner.search.choice import Section, num_ranks, samples_at_once
from weft.planner.search.crossings import Crossings
from weft.planner.search.found import ReasonKind

if TYPE_CHECKING:
    from weft.planner.search.crossings import Column
    from weft.planner.search.meshes import Unit

Numbers = npt.NDArray[np.int64]


class Rate(NamedTuple):
    """What one kind of chip could do for a given microbatch."""

    layers_per_s: float
    most: float
    """Layers that there is memory for, at best."""
    section: Section
    full_s: float
    """After how long all that there is memory for is done."""
    unit: Unit
    """What each of its meshes takes for a layer."""

    @staticmethod
    def of(unit: Unit, most: float, section: Section) -> Rate:
        """Of meshes that take so long each."""
        speed = section.meshes / unit.layer_s
        return Rate(speed, most, section, most / speed, unit)


class Combined(NamedTuple):
    """Combinations for one microbatch that may be fast enough, before there are frames of them."""

    micro: int
    tops: Sequence[Sequence[Rate]]
    picks: Sequence[Numbers]
    """Of each kind, which of its sections."""
    about_s: Column
    """What a sample takes, about, while pipelines fill and empty too."""
    per_sample_s: Column
    """At least."""
    num_meshes: Numbers

    def rates(self, number: int) -> tuple[Rate, ...]:
        """Of one of them."""
        both = zip(self.tops, self.picks, strict=True)
        return tuple(top[pick[number]] for top, pick in both)


class Wanted(NamedTuple):
    """What a pipeline has to do, and may be."""

    num_layers: int
    samples: int
    most_meshes: int
    per_sample_s: float
    """Slower ones are of no interest."""
    micros: tuple[int, ...] | None
    """Samples of a microbatch that the rank with most may have; None: any number."""


def combined(
    tops: Sequence[Sequence[Rate]],
    micro: int,
    wanted: Wanted,
    crossings: Crossings,
    unmade: Counter[ReasonKind],
) -> Combined:
    """Sections of each kind that together may be fast enough; ``unmade``: counts all others.

    Each kind's are in the order of their speed, so that all after one that is too slow are.
    """
    seconds, num_layers = micro * wanted.per_sample_s, wanted.num_layers
    picks = [each.ravel() for each in np.indices([len(top) for top in tops])]

    def of(value: Callable[[Rate], float]) -> Column:
        """By kind, of every combination."""
        both = zip(tops, picks, strict=True)
        return np.array([np.array([value(rate) for rate in top])[pick] for top, pick in both])

    speeds, meshes = of(lambda rate: rate.layers_per_s), of(lambda rate: rate.section.meshes)
    num_meshes = meshes.sum(axis=0)
    fast = -speeds[-1] < _sum(speeds[:-1]) - num_layers / seconds
    in_shape = num_meshes <= wanted.most_meshes
    if wanted.micros is not None:
        each = of(lambda rate: float(samples_at_once([rate.section], micro)))
        in_shape &= np.isin(each.max(axis=0), wanted.micros)
    most, full = of(lambda rate: rate.most), of(lambda rate: rate.full_s)
    slowest = slowest_s(num_layers, speeds, most, full)
    short = slowest == inf
    kept = fast & in_shape & (slowest < seconds)
    unmade["shape"] += int((fast & ~in_shape).sum())
    unmade["memory"] += int((fast & in_shape & short).sum())
    unmade["bound"] += int((~fast).sum() + (fast & in_shape & ~short & ~kept).sum())
    picks = [each[kept] for each in picks]
    carried_s = _carried_s(tops, picks, crossings)
    per_sample_s = np.maximum(slowest[kept] / micro, carried_s)
    num_meshes = num_meshes[kept]
    about_s = per_sample_s * (1 + (num_meshes - 1) * micro / wanted.samples / 2)
    return Combined(micro, tops, picks, about_s, per_sample_s, num_meshes)


def in_order(about_s: Column, num_meshes: Numbers, *, shallow_first: bool) -> Numbers:
    """In turn one of those that look best, and the next of a round: the best of each number of
    meshes, then the second of each, and so on. How far a bound is off depends most on how many
    meshes there are.

    Args:
        about_s: What each takes, or anything else that is less for better ones.
        shallow_first: Of each round, for they take the least effort; else what looks best.
    """
    looks = np.argsort(about_s, kind="stable")
    order = np.lexsort((about_s, num_meshes))
    firsts = np.flatnonzero(np.diff(num_meshes[order], prepend=-1))
    turns = np.empty(len(order), dtype=np.int64)
    turns[order] = np.arange(len(order)) - np.repeat(firsts, np.diff(firsts, append=len(order)))
    rounds = np.lexsort((num_meshes if shallow_first else about_s, turns))
    place = np.full(len(order), 2 * len(order))
    for number, some in enumerate((looks, rounds)):
        place[some] = np.minimum(place[some], 2 * np.arange(len(order)) + number)
    return np.argsort(place)


def slowest_s(num_layers: int, speeds: Column, most: Column, full: Column) -> Column:
    """The bound: what the fullest kind cannot hold, others do; all in the same time.

    Args:
        speeds: ``[kinds, combinations]``; layers a second.
        most: Likewise; layers that there is memory for.
        full: Likewise; after how long that is done.
    """
    slowest = num_layers / _sum(speeds)
    (uneven,) = np.nonzero((slowest > full).any(axis=0))
    order = np.argsort(full[:, uneven], axis=0, kind="stable")
    speeds, most, full = (
        np.take_along_axis(each[:, uneven], order, axis=0) for each in (speeds, most, full)
    )
    left, found = np.full(len(uneven), float(num_layers)), np.full(len(uneven), inf)
    for number in range(len(full)):
        seconds = left / _sum(speeds[number:])
        ends = (found == inf) & (seconds <= full[number])
        found[ends] = seconds[ends]
        left = left - most[number]
    slowest[uneven] = found
    return slowest


def _sum(rows: Column) -> Column:
    """Of a column's entries, from the first on."""
    found: Column = rows[0].copy()
    for row in rows[1:]:
        found += row
    return found


def _carried_s(
    tops: Sequence[Sequence[Rate]], picks: Sequence[Numbers], crossings: Crossings
) -> Column:
    """Of a sample: a pipeline's slowest border takes no less, in whichever order its kinds are."""
    least = np.zeros(len(picks[0]))
    pools = [top[0].section.pool for top in tops]
    ranks = [
        np.array([float(num_ranks(rate.section.axes)) for rate in top])[pick]
        for top, pick in zip(tops, picks, strict=True)
    ]
    for number, (top, pick) in enumerate(zip(tops, picks, strict=True)):
        inside = np.array([crossings.inside_s(rate.section) for rate in top])[pick]
        others = [
            crossings.between(pools[number], pool, np.minimum(ranks[number], ranks[place]))
            for place, pool in enumerate(pools)
            if place != number
        ]
        least = np.maximum(least, np.maximum(inside, np.minimum.reduce(others)))
    return least

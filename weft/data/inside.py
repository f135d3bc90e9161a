"""Tokens of a sample given to the ranks that divide it by the work that its documents make.

Ranks have as many tokens each, but a token attends to those before it in its document: with
several documents in a sample equal lengths are unequal work. Here a long document is cut for all
ranks, from either end (per-document sharding, as in WLB-LLM, arXiv 2503.17924), and short ones stay
whole, the greatest first, with the rank that has least. What changes is where in the sample's order
tokens are computed; each keeps its place in the sample, and no number changes but by rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from weft.axes.held import Ranges, held
from weft.data.hashing import Int64Array
from weft.plan.layout import Dim
from weft.plan.plan import Plan

Slots = tuple[Ranges, ...]
"""By rank among those that divide a sample: where its tokens are while they are computed."""

_SHORT = (1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
"""Of a rank's work: documents that make less stay whole, as many as can: what is cut is sent, and
computed in smaller products."""
_EQUAL = 1.02
"""The most work beside the mean that is equal enough to cut no more."""


def slots_of(plan: Plan, seq_len: int) -> Slots:
    """Of the stage that divides samples' tokens most finely; none where no stage does."""
    dim, finest = Dim(name="seq", size=seq_len), Slots()
    for _, _, stage in plan.stages():
        of_ranks = (
            held([dim], "inner", stage.mesh, stage.mesh.coordinate(rank))[0]
            for rank in stage.mesh.ranks
        )
        slots = tuple(dict.fromkeys(map(tuple, of_ranks)))
        finest = max(finest, slots if len(slots) > 1 else (), key=len)
    return finest


def places_by_work(lengths: Iterable[int], slots: Slots) -> Int64Array:
    """Which token of a sample each slot has, ``[seq]``: those of a rank ascend. ``lengths``: of the
    sample's documents, in order."""
    documents, given = [*lengths], list[list[range]]()
    each = sum(map(_pairs, documents)) / len(slots)
    for short in _SHORT:
        given, loads = _given(documents, slots, short * each)
        if max(loads) <= _EQUAL * each:
            break
    return _in_slots(given, slots, sum(documents))


def _given(
    lengths: Sequence[int], slots: Slots, least: float
) -> tuple[list[list[range]], list[int]]:
    """Tokens of each rank, and its pairs, where documents of more than ``least`` are cut."""
    ways = len(slots)
    rooms = [sum(map(len, own)) for own in slots]
    given: list[list[range]] = [[] for _ in slots]
    loads, rest, start = [0] * ways, [], 0

    def give(rank: int, begin: int, piece: range) -> None:
        given[rank].append(range(begin + piece.start, begin + piece.stop))
        loads[rank] += _pairs(piece.stop) - _pairs(piece.start)
        rooms[rank] -= len(piece)

    for length in lengths:
        each = length // (2 * ways) if _pairs(length) > least else 0
        over = length - 2 * ways * each  # the first ones, which are least work
        for number in range(2 * ways if each else 0):
            rank, begin = min(number, 2 * ways - 1 - number), over + number * each
            give(rank, start, range(begin, begin + each))
        rest.append((start, range(over)))
        start += length
    for begin, piece in sorted(rest, key=lambda one: _pairs(one[1].start) - _pairs(one[1].stop)):
        left = piece
        while left:
            _, rank = min((loads[n], n) for n in range(ways) if rooms[n])
            give(rank, begin, left[: rooms[rank]])
            left = left[len(given[rank][-1]) :]
    return given, loads


def _in_slots(given: Sequence[Sequence[range]], slots: Slots, seq_len: int) -> Int64Array:
    places = np.empty(seq_len, np.int64)
    for own, pieces in zip(slots, given, strict=True):
        held_here = np.sort(np.concatenate([np.arange(p.start, p.stop) for p in pieces]))
        ends = np.cumsum([len(part) for part in own])
        for part, some in zip(own, np.split(held_here, ends[:-1]), strict=True):
            places[part.start : part.stop] = some
    return places


def shares(lengths: Iterable[int], slots: Slots, token: int, places: Int64Array) -> Int64Array:
    """Work of each rank, ``[ranks]``, with so many pairs for a token beside attention."""
    cost = np.concatenate([np.arange(1, length + 1) for length in lengths]) + token
    here = cost[places]
    return np.array([sum(int(here[p.start : p.stop].sum()) for p in own) for own in slots])


def lengths_of(segments: npt.NDArray[np.integer]) -> Int64Array:
    """Of a sample's documents, from their numbers ``[seq]``."""
    borders = np.flatnonzero(np.diff(segments)) + 1
    return np.diff(borders, prepend=0, append=len(segments))


def _pairs(length: int) -> int:
    """Of the first tokens of a document, each with itself and those before it."""
    return length * (length + 1) // 2

"""Which mesh holds how many layers: the best split of a route, exact where few are possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate
from math import inf

from weft.planner.search.choice import Timed
from weft.planner.search.route import Route

MOST_SPLITS = 400
"""Where there are more, only that is played which balances the meshes best."""
MOST_ACTIONS = 150_000
"""Of all splits of a route that are played."""
_FEW = 4


@dataclass(frozen=True, slots=True)
class Explored:
    """What became of a route."""

    best: Timed | None
    """None where a bound rules the whole route out."""
    played: int
    """Plays that simulating its splits took."""
    fits: bool = True


def explore(route: Route, cutoff: float, *, brief: bool = False) -> Explored:
    """The best split that takes less than ``cutoff`` seconds; ``brief``: the one that balances the
    meshes best, whatever it takes."""
    total = route.costs.num_layers
    no = _ruled_out(route, route.roomy, cutoff) or _ruled_out(route, route.room, cutoff)
    if no is not None:
        return no
    first = filled(route, total)
    best = route.timed(first)
    if brief:
        return Explored(best, 1)
    most = route.most_within(min(best.seconds, cutoff) - route.once, route.room)
    bearable = max(_FEW, min(MOST_SPLITS, MOST_ACTIONS // route.actions))
    if count_splits(route.least, most, total) > bearable:
        return Explored(best, 1)
    others = [layers for layers in splits(route.least, most, total) if layers != first]
    seconds = route.seconds_of(others)
    if others and min(seconds) < best.seconds:
        best = route.timed(others[seconds.index(min(seconds))])
    return Explored(best, 1 + route.plays(len(others)))


def _ruled_out(route: Route, room: Sequence[int], cutoff: float) -> Explored | None:
    """What becomes of a route that does not fit where its meshes have such room, or is too slow."""
    total = route.costs.num_layers
    if not has_place(route.least, room, total):
        return Explored(None, 0, fits=False)
    within = route.most_within(cutoff - route.once, room)
    return None if has_place(route.least, within, total) else Explored(None, 0)


def too_slow(route: Route, cutoff: float) -> bool:
    """However much memory there were, and whatever ZeRO did."""
    total = route.costs.num_layers
    most = route.most_within(cutoff, [total] * route.num_meshes)
    return not has_place(route.least, most, total)


def count_splits(least: Sequence[int], most: Sequence[int], total: int) -> int:
    """How many ways there are to divide ``total`` within the limits."""
    free = total - sum(least)
    if free < 0 or any(low > high for low, high in zip(least, most, strict=True)):
        return 0
    ways = [1, *[0] * free]
    for low, high in zip(least, most, strict=True):
        sums = [0, *accumulate(ways)]
        width = high - low + 1
        ways = [sums[n + 1] - sums[max(0, n + 1 - width)] for n in range(free + 1)]
    return ways[free]


def has_place(least: Sequence[int], most: Sequence[int], total: int) -> bool:
    """So many layers can be divided within the limits."""
    fits = all(low <= high for low, high in zip(least, most, strict=True))
    return fits and sum(least) <= total <= sum(most)


def splits(least: Sequence[int], most: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """Every way to divide ``total`` within the limits."""
    if not has_place(least, most, total):
        return
    lows = [0, *accumulate(reversed(least))]
    highs = [0, *accumulate(reversed(most))]

    def rest(mesh: int, left: int) -> Iterator[tuple[int, ...]]:
        behind = len(least) - mesh - 1
        if behind < 0:
            yield ()
            return
        low = max(least[mesh], left - highs[behind])
        high = min(most[mesh], left - lows[behind])
        for number in range(high, low - 1, -1):
            for others in rest(mesh + 1, left - number):
                yield (number, *others)

    yield from rest(0, total)


def filled(route: Route, total: int) -> tuple[int, ...]:
    """Layers one by one to where the step's bound grows least, as memory allows."""
    layers, bounds = list(route.least), route.bounds

    def with_one_more(mesh: int) -> tuple[float, int]:
        more = layers[mesh] + 1
        return (bounds.of(mesh, more) if more <= route.room[mesh] else inf), mesh

    heap = [with_one_more(mesh) for mesh in range(len(layers))]
    heapify(heap)
    for _ in range(total - sum(layers)):
        mesh = heap[0][1]
        layers[mesh] += 1
        heapreplace(heap, with_one_more(mesh))
    return tuple(layers)

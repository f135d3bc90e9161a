"""More microbatches in flight than usual, for pipelines whose borders take long.

Under 1F1B position ``p`` of ``P`` holds ``P - p`` microbatches: enough where crossing a border
takes no time. While one is on its way from a mesh to the last and back, as long as all meshes
behind compute and all borders behind take, there and back, the mesh does as many more as go into
that. With fewer all wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from math import ceil

from weft.planner.search.route import Route
from weft.schedules.registry import SCHEDULES

PARTS = 1.0, 0.5
"""Of what hides all of the ways: less of it needs less memory."""
WORTH = 0.05
"""Part of a step that is spent waiting with usual numbers, from which others are tried."""
LITTLE = 0.05
"""Of a microbatch, for which none more is in flight."""


def deeper(route: Route) -> Iterator[tuple[int, ...]]:
    """Numbers in flight with which a route of the usual ones waits less for its borders."""
    line, meshes = route.line, route.num_meshes
    if SCHEDULES[line.schedule].deeper is None or meshes == 1 or not route.costs.options.in_flight:
        return
    cycle_s = route.course.cycle_s
    ways = [2 * (each.transfer_s + each.latency_s) / cycle_s for each in route.borders]
    behind = list(accumulate(reversed(ways), initial=0.0))[::-1]
    if behind[0] < WORTH * meshes:
        return
    many = -(-line.samples // line.micro)
    found = {(*range(meshes, 0, -1),)}
    for part in PARTS:
        counts = (meshes - p + part * behind[p] for p in range(meshes))
        held = tuple(min(many, ceil(count - LITTLE)) for count in counts)
        if held not in found:
            found.add(held)
            yield held

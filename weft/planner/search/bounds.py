"""What a step takes at least, by the layers of one mesh: admissible, so that nothing best is lost.

Every bound is a straight line in the mesh's layers. Before a mesh begins, the first microbatch
comes down to it; after its last backward, that goes back up; in between it does all its own work.
Under 1F1B and GPipe a microbatch also passes through all others once, which is more than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor

from weft.cost.times import BorderTimes
from weft.plan.plan import ScheduleName
from weft.planner.search.choice import Line
from weft.planner.search.costs import Costs, Held, Rank
from weft.planner.search.slopes import MeshTimes, Slope
from weft.schedules.registry import SCHEDULES
from weft.simulate.play import last_size

_SLACK = 1e-9
"""Relative; sums of many seconds differ by the order in which they are added."""


MANY = 1 << 20
"""Layers; more than any model has."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds on a step by mesh."""

    slopes: list[list[Slope]]
    least: float
    """However many layers there are."""

    def of(self, mesh: int, layers: int) -> float:
        """Seconds that a step takes at least with so many layers on a mesh."""
        every = (slope.at(layers) for slope in self.slopes[mesh])
        return max(self.least, *every) * (1 - _SLACK)

    def most(self, mesh: int, seconds: float) -> int:
        """The most layers of a mesh that the bounds allow; -1 where not even none."""
        within = seconds * (1 + _SLACK)
        if within < self.least:
            return -1
        most = min((within - slope.base) / slope.each for slope in self.slopes[mesh])
        return max(floor(min(most, MANY)), -1)


@dataclass(frozen=True, slots=True)
class Flow:
    """What bounds know of a pipeline: its meshes and borders, and what flows through them."""

    meshes: Sequence[MeshTimes]
    lasts: Sequence[MeshTimes]
    """For the last microbatch, which may be smaller."""
    borders: Sequence[BorderTimes]
    carrying: float
    """Seconds for which what sends longest is busy with a full microbatch; and with the last."""
    carrying_last: float
    line: Line
    num_layers: int


def bounds_of(flow: Flow, least: Sequence[int]) -> Bounds:
    """Bounds on a step without ``least_once``, where meshes have at least these layers.

    With a smaller last microbatch there are two of each: with it as the last, and without it.
    """
    samples, micro = flow.line.samples, flow.line.micro
    many, size = -(-samples // micro), last_size(samples, micro)
    ends = [(many - 1, flow.lasts, size)]
    if size < 1 and many > 1:
        ends.append((many - 2, flow.meshes, 1.0))
    slopes: list[list[Slope]] = [[] for _ in flow.meshes]
    for before, lasts, part in ends:
        way = _Way(flow, least, lasts, part)
        for p, both in enumerate(zip(flow.meshes, lasts, strict=True)):
            slopes[p] += _alone(way, p, *both, before)
            if way.through is not None:
                slopes[p] += _with_others(way, p, both[0], before)
    return Bounds(slopes, (many - 1) * flow.carrying + flow.carrying_last)


class _Way:
    """How long microbatches are on their way down to each mesh, and from it back up."""

    def __init__(
        self, flow: Flow, least: Sequence[int], lasts: Sequence[MeshTimes], size: float
    ) -> None:
        """``lasts``: of the last that comes back, which is such a part of a full one."""
        schedule = SCHEDULES[flow.line.schedule]
        self.schedule, self.num_meshes = flow.line.schedule, len(lasts)
        chunks, self.splits = schedule.chunks, schedule.splits_backward
        self.held = flow.line.in_flight or range(self.num_meshes, 0, -1)
        """Microbatches that each mesh may hold under 1F1B."""
        self.down, self.up = [0.0], [0.0]
        first = flow.lasts if flow.line.samples <= flow.line.micro else flow.meshes
        ways = zip(first, lasts, least, flow.borders, strict=False)
        for mesh, last, layers, border in ways:
            early = -(-layers // chunks)
            forward = mesh.first_forward + early * mesh.forward.each
            back = last.first_back + early * last.back.each
            there_s, back_s = border.of_sizes(size)
            self.down.append(self.down[-1] + forward + there_s + border.latency_s)
            self.up.append(self.up[-1] + back + back_s + border.latency_s)
        self.through: float | None = None
        """Seconds of a microbatch through all meshes and back, where none overtakes another."""
        if flow.line.schedule in ("1f1b", "gpipe"):
            borders = sum(2 * (s.of_sizes(size)[1] + s.latency_s) for s in flow.borders)
            fewest = flow.num_layers * min(m.whole.each for m in lasts)
            known = sum(m.whole.each * n for m, n in zip(lasts, least, strict=True))
            self.through = sum(m.whole.base for m in lasts) + max(fewest, known) + borders


def _alone(way: _Way, p: int, mesh: MeshTimes, last: MeshTimes, before: int) -> Iterator[Slope]:
    """All that a mesh does itself, between the way down and the way up."""
    there, back = way.down[p], way.up[p]
    whole = mesh.whole.then(before, last.whole)
    if not way.splits:
        yield whole.after(there + back)
        return
    yield whole.after(there)
    yield mesh.early.then(before, last.early).after(there + back)


def _with_others(way: _Way, p: int, mesh: MeshTimes, before: int) -> Iterator[Slope]:
    """The last microbatch through all other meshes, and what a mesh does of the others meanwhile.

    Under 1F1B a mesh can do no more than its first few forwards until the first one is back.
    """
    assert way.through is not None, way.schedule
    waiting = way.held[p] - 1 if way.schedule == "1f1b" else 0
    (base, each), first = mesh.whole, mesh.forward
    slope = Slope(
        before * base - waiting * first.base + way.through, before * each - waiting * first.each
    )
    if before >= waiting and slope.each > 0:
        yield slope


def least_once(costs: Costs, ranks: Sequence[Rank], schedule: ScheduleName) -> float:
    """Some mesh has at least the mean number of layers; what that one does once."""
    mean = -(-costs.num_later // len(ranks))
    held = Held(mean // SCHEDULES[schedule].chunks, False, False)
    return min(costs.times(rank, held).update_s for rank in dict.fromkeys(ranks))

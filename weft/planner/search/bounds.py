"""What a step takes at least, by the layers of one mesh: admissible, so that nothing best is lost.

Every bound is a straight line in the mesh's layers. Before a mesh begins, the first microbatch
comes down to it; after its last backward, that goes back up; in between it does all its own work.
Under 1F1B and GPipe a microbatch also passes through all others once, which is more than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor
from typing import NamedTuple

from weft.cost.times import BorderTimes
from weft.plan.plan import ScheduleName
from weft.planner.search.choice import Line
from weft.planner.search.costs import Costs, Held, Rank
from weft.schedules.registry import SCHEDULES
from weft.simulate.play import last_size

_SLACK = 1e-9
"""Relative; sums of many seconds differ by the order in which they are added."""


MANY = 1 << 20
"""Layers; more than any model has."""


class Slope(NamedTuple):
    """Seconds: at no layers, and of each layer."""

    base: float
    each: float

    def at(self, layers: float) -> float:
        return self.base + self.each * layers


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds on a step by mesh."""

    slopes: list[list[Slope]]

    def of(self, mesh: int, layers: int) -> float:
        """Seconds that a step takes at least with so many layers on a mesh."""
        return max(slope.at(layers) for slope in self.slopes[mesh]) * (1 - _SLACK)

    def most(self, mesh: int, seconds: float) -> int:
        """The most layers of a mesh that the bounds allow; -1 where not even none."""
        within = seconds * (1 + _SLACK)
        most = min((within - slope.base) / slope.each for slope in self.slopes[mesh])
        return max(floor(min(most, MANY)), -1)


class MeshTimes(NamedTuple):
    """Seconds of a full microbatch on one mesh, all its stages together."""

    forward: Slope
    back: Slope
    """Of the input's gradient, where backward is in halves; else all of it."""
    whole: Slope
    first_forward: float
    """Of its first stage without layers; and the backward."""
    first_back: float


@dataclass(frozen=True, slots=True)
class Flow:
    """What bounds know of a pipeline: its meshes and borders, and what flows through them."""

    meshes: Sequence[MeshTimes]
    borders: Sequence[BorderTimes]
    line: Line
    num_layers: int


def bounds_of(flow: Flow, least: Sequence[int]) -> Bounds:
    """Bounds on a step without ``least_once``, where meshes have at least these layers.

    With a smaller last microbatch there are two of each: with all of it, and without it.
    """
    meshes = flow.meshes
    samples, micro = flow.line.samples, flow.line.micro
    last = last_size(samples, micro)
    amounts = [(samples / micro, last)]
    if last < 1:
        amounts.append((float(samples // micro), 1.0))
    slopes: list[list[Slope]] = [[] for _ in meshes]
    for many, size in amounts:
        way = _Way(flow, least, size)
        for p, mesh in enumerate(meshes):
            slopes[p] += _alone(way, p, mesh, many)
            if way.through is not None:
                slopes[p] += _with_others(way, p, mesh, many)
    return Bounds(slopes)


class _Way:
    """How long microbatches are on their way down to each mesh, and from it back up."""

    def __init__(self, flow: Flow, least: Sequence[int], size: float) -> None:
        meshes, schedule = flow.meshes, SCHEDULES[flow.line.schedule]
        self.schedule, self.size, self.num_meshes = flow.line.schedule, size, len(meshes)
        chunks, self.splits = schedule.chunks, schedule.splits_backward
        self.down, self.up = [0.0], [0.0]
        for mesh, layers, border in zip(meshes, least, flow.borders, strict=False):
            early = -(-layers // chunks)
            forward = mesh.first_forward + early * mesh.forward.each
            back = mesh.first_back + early * mesh.back.each
            self.down.append(self.down[-1] + forward + border.transfer_s + border.latency_s)
            self.up.append(self.up[-1] + (back + border.transfer_s) * size + border.latency_s)
        self.through: float | None = None
        """Seconds of a microbatch through all meshes and back, where none overtakes another."""
        if flow.line.schedule in ("1f1b", "gpipe"):
            borders = sum(s.transfer_s * (1 + size) + 2 * s.latency_s for s in flow.borders)
            fewest = flow.num_layers * min(m.whole.each for m in meshes)
            known = sum(m.whole.each * n for m, n in zip(meshes, least, strict=True))
            base = sum(m.whole.base for m in meshes)
            self.through = size * (base + max(fewest, known)) + borders


def _alone(way: _Way, p: int, mesh: MeshTimes, many: float) -> Iterator[Slope]:
    """All that a mesh does itself, between the way down and the way up."""
    there, back = way.down[p], way.up[p]
    if not way.splits:
        yield Slope(there + back + many * mesh.whole.base, many * mesh.whole.each)
        return
    yield Slope(there + many * mesh.whole.base, many * mesh.whole.each)
    base, each = mesh.forward.base + mesh.back.base, mesh.forward.each + mesh.back.each
    yield Slope(there + back + many * base, many * each)


def _with_others(way: _Way, p: int, mesh: MeshTimes, many: float) -> Iterator[Slope]:
    """A microbatch through all other meshes, and what a mesh does of the others meanwhile.

    Under 1F1B a mesh can do no more than its first few forwards until the first one is back.
    """
    assert way.through is not None, way.schedule
    waiting = way.num_meshes - 1 - p if way.schedule == "1f1b" else 0
    rest = many - way.size
    base = way.through + rest * mesh.whole.base - waiting * mesh.forward.base
    each = rest * mesh.whole.each - waiting * mesh.forward.each
    if many > waiting and each > 0:
        yield Slope(base, each)


def mesh_times(
    costs: Costs, rank: Rank, ends: Sequence[tuple[bool, bool]], *, split: bool
) -> MeshTimes:
    """Of one mesh.

    Args:
        rank: With ZeRO that costs nothing.
        ends: For each of its stages, whether it is the model's first and its last.
        split: Backward is in halves.
    """
    held = Held(1, False, False), *(Held(0, first, last) for first, last in ends)
    times = [costs.times(rank, each) for each in held]
    forward = [time.of("F") for time in times]
    back = [time.of("I" if split else "B") for time in times]
    whole = [time.of("F") + time.of("B") for time in times]
    return MeshTimes(
        forward=Slope(sum(forward[1:]), forward[0]),
        back=Slope(sum(back[1:]), back[0]),
        whole=Slope(sum(whole[1:]), whole[0]),
        first_forward=forward[1],
        first_back=back[1],
    )


def least_once(costs: Costs, ranks: Sequence[Rank], schedule: ScheduleName) -> float:
    """Some mesh has at least the mean number of layers; what that one does once."""
    mean = -(-costs.num_layers // len(ranks))
    held = Held(mean // SCHEDULES[schedule].chunks, False, False)
    return min(costs.times(rank, held).update_s for rank in dict.fromkeys(ranks))

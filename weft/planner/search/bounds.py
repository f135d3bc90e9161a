"""What a step takes at least, by the layers of one mesh: admissible, so that nothing best is lost.

Every bound is a straight line in the mesh's layers. Before a mesh begins, the first microbatch
comes down to it; after its last backward, that goes back up; in between it does all its own work.
Under 1F1B and GPipe a microbatch also passes through all others once, which is more than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import floor
from typing import TYPE_CHECKING, NamedTuple

from weft.planner.search.choice import chunks_of
from weft.planner.search.costs import Held
from weft.schedules.registry import splits_backward
from weft.simulate.play import last_size

if TYPE_CHECKING:
    from weft.planner.search.route import Route

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


class _Mesh(NamedTuple):
    """Seconds of a full microbatch on one mesh, all its stages together."""

    forward: Slope
    back: Slope
    """Of the input's gradient, where backward is in halves; else all of it."""
    whole: Slope
    down: float
    """Its first stage's forward, with the fewest layers; and its backward."""
    up: float


def bounds_of(route: Route, least: Sequence[int]) -> Bounds:
    """Bounds on ``route.seconds`` without ``least_once``, where meshes have at least these layers.

    With a smaller last microbatch there are two of each: with all of it, and without it.
    """
    meshes = list(_meshes(route, least))
    last = last_size(route.samples, route.micro)
    amounts = [(route.samples / route.micro, last)]
    if last < 1:
        amounts.append((float(route.pattern.num_microbatches - 1), 1.0))
    slopes: list[list[Slope]] = [[] for _ in meshes]
    for many, size in amounts:
        way = _Way(route, meshes, size)
        for p, mesh in enumerate(meshes):
            slopes[p] += _alone(way, p, mesh, many)
            if route.schedule in ("1f1b", "gpipe"):
                slopes[p] += _with_others(way, p, mesh, many, least)
    return Bounds(slopes)


class _Way:
    """How long microbatches are on their way down to each mesh, and from it back up."""

    def __init__(self, route: Route, meshes: Sequence[_Mesh], size: float) -> None:
        there = [0.0, *accumulate(seam.transfer_s + seam.latency_s for seam in route.seams)]
        back = [0.0, *accumulate(seam.transfer_s * size + seam.latency_s for seam in route.seams)]
        ahead = [0.0, *accumulate(mesh.down for mesh in meshes)]
        behind = [0.0, *accumulate(mesh.up * size for mesh in meshes)]
        self.route, self.meshes, self.size = route, meshes, size
        self.down = [ahead[p] + there[p] for p in range(len(meshes))]
        self.up = [behind[p] + back[p] for p in range(len(meshes))]
        self.seams = there[-1] + back[-1]


def _alone(way: _Way, p: int, mesh: _Mesh, many: float) -> Iterator[Slope]:
    """All that a mesh does itself, between the way down and the way up."""
    there, back = way.down[p], way.up[p]
    if not splits_backward(way.route.schedule):
        yield Slope(there + back + many * mesh.whole.base, many * mesh.whole.each)
        return
    yield Slope(there + many * mesh.whole.base, many * mesh.whole.each)
    base, each = mesh.forward.base + mesh.back.base, mesh.forward.each + mesh.back.each
    yield Slope(there + back + many * base, many * each)


def _with_others(
    way: _Way, p: int, mesh: _Mesh, many: float, least: Sequence[int]
) -> Iterator[Slope]:
    """A microbatch through all other meshes, and what a mesh does of the others meanwhile.

    Under 1F1B a mesh can do no more than its first few forwards until the first one is back.
    """
    total = way.route.costs.workload.spec.num_layers
    fewest = total * min(other.whole.each for other in way.meshes)
    known = sum(other.whole.each * n for other, n in zip(way.meshes, least, strict=True))
    through = way.size * (sum(other.whole.base for other in way.meshes) + max(fewest, known))
    waiting = len(way.meshes) - 1 - p if way.route.schedule == "1f1b" else 0
    rest = many - way.size
    base = through + way.seams + rest * mesh.whole.base - waiting * mesh.forward.base
    each = rest * mesh.whole.each - waiting * mesh.forward.each
    if many > waiting and each > 0:
        yield Slope(base, each)


def _meshes(route: Route, least: Sequence[int]) -> Iterator[_Mesh]:
    split, chunks = splits_backward(route.schedule), chunks_of(route.schedule)
    final = route.pattern.num_stages - 1
    for spot, stages, layers in zip(route.spots, route.positions, least, strict=True):
        plain = spot._replace(zero=0)
        one = route.costs.times(plain, Held(1, False, False))
        ends = [route.costs.times(plain, Held(0, stage == 0, stage == final)) for stage in stages]
        backs = [times.of("I" if split else "B") for times in (one, *ends)]
        whole = [times.of("F") + times.of("B") for times in (one, *ends)]
        early = -(-layers // chunks)
        yield _Mesh(
            forward=Slope(sum(end.forward_s for end in ends), one.forward_s),
            back=Slope(sum(backs[1:]), backs[0]),
            whole=Slope(sum(whole[1:]), whole[0]),
            down=ends[0].forward_s + early * one.forward_s,
            up=backs[1] + early * backs[0],
        )


def least_once(route: Route) -> float:
    """Some mesh has at least the mean number of layers; what that one does once."""
    mean = -(-route.costs.workload.spec.num_layers // route.num_meshes)
    chunks = chunks_of(route.schedule)
    share = Held(mean // chunks, False, False)
    return min(route.costs.once(spot, share) for spot in dict.fromkeys(route.spots))

"""What the chips of one kind can do at best: layers of a model in some time.

Each chip computes, with its layers, a part of the model for all samples: at most at the rate of the
best mesh that it can be part of, as deep a pipeline as that is, whose first microbatch comes down
and whose last goes back; and sums what others of its mesh have of the same layers. It holds no more
layers than it has memory for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from itertools import chain, product
from math import inf
from operator import attrgetter
from typing import NamedTuple

from weft.cost.timing import Hardware, Software
from weft.cost.traffic import Fabric
from weft.cost.work import Axes, share
from weft.plan.plan import Recompute
from weft.planner.problem import Problem
from weft.planner.search.choice import Section, mesh_axes, num_ranks
from weft.planner.search.costs import KnownCosts
from weft.planner.search.frames import Space
from weft.planner.search.meshes import Meshes, divisors, powers
from weft.schedules.registry import SCHEDULES


class Deep(NamedTuple):
    """Meshes of one kind of chip, one after another: as many samples at a time as chips allow."""

    rate: float
    """Samples times layers a second, at most."""
    pool: int
    inner: Axes
    meshes: int
    each: int
    """Samples of a microbatch on a rank."""
    recompute: Recompute
    ways: int = 1
    """At most: ranks of each mesh that compute other samples."""

    @property
    def unit(self) -> tuple[int, Axes, Recompute, int]:
        """What a layer's time depends on."""
        return self.pool, self.inner, self.recompute, self.each


class Reached(NamedTuple):
    """What the chips of a kind can do."""

    seconds: float
    """Of a layer of all samples, with what a step does once with it."""
    most: float
    """Layers of the model that there is room for."""
    from_s: float
    """What crosses from mesh to mesh takes at least as long."""
    ends_s: float
    """Of embedding and head of all samples, likewise."""

    def layers(self, seconds: float, *, ends: bool) -> float:
        """In so long; ``ends``: beside embedding and head, else as if a part of them were some."""
        if seconds < self.from_s:
            return 0.0
        if ends:
            return min(self.most, (seconds - self.ends_s) / self.seconds)
        return min(self.most + self.ends_s / self.seconds, seconds / self.seconds)

    def beats(self, other: Reached) -> bool:
        """Does as many layers in every time, beside embedding and head or not."""
        return (
            self.seconds <= other.seconds
            and self.from_s <= other.from_s
            and self.ends_s <= other.ends_s
            and self.most >= other.most
            and self.layers(inf, ends=False) >= other.layers(inf, ends=False)
        )


class Kinds:
    """Of a problem, kind by kind; ``many``: pipelines side by side at most."""

    def __init__(self, problem: Problem, many: int, known: KnownCosts, *, any_room: bool) -> None:
        """``any_room``: no kind's memory binds."""
        options = problem.options
        self.problem, self.samples, self.any_room = problem, problem.workload.samples, any_room
        self.costs, beside = known.of(problem, 1, any_ways=True), known.of(problem, many)
        self.num_layers = self.costs.num_later
        self.meshes = Meshes(self.costs)
        self.roomy = Space(
            Meshes(beside, self.meshes), self.samples, self.samples if many == 1 else 1
        )
        named = [SCHEDULES[name] for name in options.schedules]
        self.chunks = max(each.chunks for each in named)
        self.splits = any(each.splits_backward for each in named)
        self.mixed = options.mixed_recompute and "full" in options.recompute
        self.best_first: Callable[[int], list[Deep]] = cache(self._by_rate)
        self.reached: Callable[[int], list[Reached]] = cache(self._reached_by)

    def _reached_by(self, pool: int) -> list[Reached]:
        """None that another beats."""
        best: list[Reached] = []
        for reached in sorted(self._tried(pool)):
            if not any(other.beats(reached) for other in best):
                best.append(reached)
        return best

    def _tried(self, pool: int) -> list[Reached]:
        """All but those that are slower than enough; those of fewer samples at a time once much is
        ruled out."""
        found: list[Reached] = []
        enough, deeps = inf, self.best_first(pool)
        most = ((deep, range(deep.ways, deep.ways - 1, -1)) for deep in deeps)
        fewer = ((deep, range(deep.ways - 1, 0, -1)) for deep in deeps)
        for deep, numbers in chain(most, fewer):
            for ways in numbers:
                if self.samples / self._rate(deep, ways) >= enough:
                    break
                if not self.meshes.fills(self._section(deep, ways)):
                    continue
                seconds = self._seconds(deep, ways)
                if seconds < enough:
                    found.append(self._with(deep, ways, seconds))
                    enough = min(enough, self._enough(found[-1]))
        return found

    def _enough(self, reached: Reached) -> float:
        """Seconds of a layer with which no other does more in any time that a step may take.

        Where there is room for everything and what crosses never holds it up, its layers, ``(t -
        ends) / seconds``, grow the faster with time: they are more at all times if they are at the
        soonest end, even where the other's ends take nothing.
        """
        soonest = self._soonest_s
        if reached.most < self.num_layers or max(reached.from_s, reached.ends_s) >= soonest:
            return inf
        return reached.seconds * soonest / (soonest - reached.ends_s)

    @cached_property
    def _soonest_s(self) -> float:
        """Seconds of all layers, with every chip at its best rate."""
        pools = range(len(self.costs.pools))
        rates = [self.best_first(pool)[0].rate for pool in pools if self.best_first(pool)]
        return self.samples * self.num_layers / sum(rates) if rates else inf

    def samples_a_second(self, pool: int) -> float:
        """Of the whole model, by all chips of a kind where each has all layers."""
        rates = [0.0]
        for deep in self.best_first(pool):
            if deep.meshes == num_ranks(deep.inner) == 1:
                unit = self.meshes.unit(*deep.unit)
                rates.append(deep.each / (self.num_layers + unit.ends) / unit.layer_s)
        return self.costs.pools[pool].num_chips * max(rates)

    def _by_rate(self, pool: int) -> list[Deep]:
        """The highest first."""
        return sorted(self._deep(pool), key=attrgetter("rate"), reverse=True)

    def _deep(self, pool: int) -> Iterator[Deep]:
        """Every depth and way to divide layers, with samples on as many ranks as there are."""
        options, chips = self.problem.options, self.costs.pools[pool].num_chips
        each = options.micros or sorted({*powers(self.samples), *divisors(self.samples)})
        for inner, b, recompute in product(self.meshes.inner(pool), each, options.recompute):
            group, samples = num_ranks(inner), b * share(inner, "samples")
            for many in self.meshes.counts(chips // group):
                ways = min(chips // (group * many), self.samples // samples)
                if ways:
                    deep = Deep(0.0, pool, inner, many, b, recompute, ways)
                    yield deep._replace(rate=self._rate(deep, ways))

    def _rate(self, deep: Deep, ways: int) -> float:
        return self._together(deep, ways) / self.meshes.unit(*deep.unit).layer_s

    def _together(self, deep: Deep, ways: int) -> float:
        """Samples that the meshes compute at a time, in the mean over a step.

        Mesh k of p has ``w_k`` to do for a microbatch and waits until the first is there, and what
        follows of the last: ``n w_k + part * (w_0 + ... + w_{k-1}) <= T`` for n microbatches. So
        ``w_k <= T / n * (1 - part / n) ^ k``, and all together do the sum of that.
        """
        micro = deep.each * share(deep.inner, "samples") * ways
        many = self.samples / micro
        part = self._part(deep)
        return micro * many / part * (1 - (1 - part / many) ** deep.meshes)

    def _part(self, deep: Deep) -> float:
        """Of a layer's time, what is on the way down to a mesh behind it, or back up."""
        if not self.splits:
            return 1 / self.chunks
        return self.meshes.unit(*deep.unit).forward / self.chunks

    def _seconds(self, deep: Deep, ways: int) -> float:
        """As ``Reached`` has them."""
        times = self.samples / self._together(deep, ways)
        every = self.meshes.at_levels(self._section(deep, ways), deep.each)
        return min(times * each.layer_s + each.once_s / deep.meshes for each in every)

    def _with(self, deep: Deep, ways: int, seconds: float) -> Reached:
        section = self._section(deep, ways)
        micro = deep.each * section.ways
        roomy = "full" if self.mixed else deep.recompute
        most = self.roomy.most(section._replace(recompute=roomy), deep.each, micro)
        return Reached(
            seconds=seconds,
            most=inf if self.any_room else max(most, 0.0),
            from_s=self.samples * self.roomy.crossings.inside_s(section),
            ends_s=self.meshes.ends_s(section, deep.each, micro / self.samples)
            * (self.samples / micro / deep.meshes),
        )

    def _section(self, deep: Deep, ways: int) -> Section:
        return Section(deep.pool, mesh_axes(ways, deep.inner), deep.meshes, deep.recompute)

    def fabric(self, pool: int) -> Fabric:
        return self._hardware(pool).fabric

    def software(self, pool: int) -> Software:
        return self._hardware(pool).software

    def _hardware(self, pool: int) -> Hardware:
        return self.costs.hardware(pool, self.costs.pools[pool].chips_per_node)


def most_layers(kind: Sequence[Reached], seconds: float, *, ends: bool) -> float:
    """Of a model that chips of a kind can do in so long."""
    return max((each.layers(seconds, ends=ends) for each in kind), default=0.0)

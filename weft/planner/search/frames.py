"""The space: which meshes each kind of chip may form, and what they could do at best.

A frame is the sections of one pipeline and its microbatch; order, schedule, ZeRO and layers are
still open. Its bound knows how many layers each kind has memory for, and how fast it does them.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property, lru_cache
from itertools import pairwise, product
from math import factorial, prod
from typing import TYPE_CHECKING, NamedTuple

from weft.cost.work import share
from weft.plan.plan import ScheduleName
from weft.planner.search.choice import (
    SAMPLES,
    Section,
    inner_of,
    mesh_axes,
    num_ranks,
    samples_at_once,
)
from weft.planner.search.crossings import Crossings
from weft.planner.search.found import ReasonKind
from weft.planner.search.meshes import ALL_UP_TO, Meshes, Unit, divisors, powers, sizes
from weft.schedules.registry import SCHEDULES
from weft.simulate.play import last_size

if TYPE_CHECKING:
    from weft.planner.search.combined import Combined, Rate

MOST_COMBINATIONS = 1600
"""Of sections of several kinds, for one microbatch."""
MORE = 4
"""Times as many, of few chips: bounds tell little there, and there is time to look."""
MOST_FRAMES = 2000
"""Of several kinds, in the order of ``in_order``."""
MOST_MICROS = 48
"""Sizes of a microbatch that are tried with pipelines through several kinds."""
UNMADE: dict[ReasonKind, str] = {
    "axis": "divide the model along an axis that cannot",
    "bound": "at best slower than what is known",
    "limit": "less promising than the many that were looked at",
    "memory": "do not hold the model",
    "shape": "do not fill nodes evenly, or are too many",
}
"""Why combinations of sections become no frame."""


class Frame(NamedTuple):
    """One pipeline as far as its bound goes."""

    per_sample_s: float
    """Of a step, at least."""
    micro: int
    sections: tuple[Section, ...]
    """In the order of the cluster's pools."""
    num_meshes: int
    """Of all kinds."""
    ways: int
    """Orders and levels of ZeRO that are open."""
    stretch: float
    """How many times longer a step takes because the last of its ranks is late."""
    late_s: float
    """``per_sample_s`` with that."""
    speeds: tuple[tuple[float, int], ...]
    """Of each section, the fastest first: layers a second of each mesh, and meshes."""
    num_layers: float
    """Of the model, its ends counted as so many where they are known."""
    forward: float
    """Part of a layer's time that is forward, at least."""
    backward: float
    """Likewise; the rest is what it takes once a step."""
    rough: bool = False
    """Quickly made: what a step does once is not in it; see ``Space.refined``."""

    def least_s(self, samples: int, schedules: Sequence[ScheduleName]) -> float:
        """Of a step with some of these schedules, at least: while pipelines fill and empty, not all
        meshes work."""
        many = max(samples / self.micro, 1.0)
        rest = 1 - self.waits(samples, schedules) / many
        together, left = 0.0, 1.0
        for speed, meshes in self.speeds:
            after = left * rest**meshes
            together += speed * (left - after)
            left = after
        filled_s = self.num_layers * many * (1 - rest) / together
        return max(self.stretch * filled_s, samples * self.late_s)

    def is_slow(self, samples: int, schedules: Sequence[ScheduleName], cutoff: float) -> bool:
        """A step takes at least as long; most are told by what is quickly known."""
        return samples * self.late_s >= cutoff or self.least_s(samples, schedules) >= cutoff

    def waits(self, samples: int, schedules: Sequence[ScheduleName]) -> float:
        """Part of its time for a microbatch by which each mesh delays all that are further from the
        ends: until the first microbatch is down, and until the last is up."""
        whole = self.forward + self.backward * last_size(samples, self.micro)
        split, others = _most_chunks(tuple(schedules))
        return min(self.forward / split if split else whole, whole / max(others, 1))


class Space:
    """Frames of a workload on a cluster, for pipelines that take about so many samples."""

    def __init__(self, meshes: Meshes, samples: int, fewest: int) -> None:
        """``fewest``: samples for which the bounds have to hold too."""
        self.meshes, self.costs, self.options = meshes, meshes.costs, meshes.costs.options
        self.num_layers, self.samples, self.fewest = meshes.costs.num_later, samples, fewest
        self.crossings = Crossings(meshes.costs)
        self.unmade: Counter[ReasonKind] = Counter()
        """Combinations of sections of which no frame was made, by why; see ``UNMADE``."""
        self.rates: Callable[[int, int, int], list[Rate]] = cache(self._rates)
        """Asked often with the same."""

    def micros(self, pools: Sequence[int]) -> list[int]:
        """Microbatches that give some ranks a number of samples that options allow."""
        ways = {section.ways for pool in pools for section in self._placed(pool)}
        every = sorted({n * b for n in ways for b in self._each(n) if n * b <= self.samples})
        if len(every) <= MOST_MICROS:
            return every
        even = [micro for micro in every if self.samples % micro == 0]
        return even if len(even) <= MOST_MICROS else [n for n in even if n & (n - 1) == 0]

    def alone(self, pool: int, per_sample_s: float) -> Iterator[Frame]:
        """Pipelines on one kind of chip, of which the bound is below ``per_sample_s``, as far as it
        is quickly known: most are told by that.

        Every rank has as many samples.
        """
        for placed in self._placed(pool):
            inner, ways = inner_of(placed.axes), placed.ways
            carried_s = self.crossings.inside_s(placed)
            first: Frame | None = None
            for b, recompute in product(self._each(ways), self.options.recompute):
                micro = ways * b
                if micro > self.samples:
                    continue
                unit = self.meshes.unit(pool, inner, recompute, b)
                least_s = max(self._alone_s(unit, placed), micro * carried_s)
                if least_s >= micro * per_sample_s:
                    self.unmade["bound"] += 1
                    continue
                section = placed._replace(recompute=recompute)
                if why := self._unmade(section, b, micro):
                    self.unmade[why] += 1
                    continue
                first = first or self._frame(0.0, micro, (section,), (), [unit])
                like = first._replace(micro=micro, sections=(section,), rough=True)
                yield self._promising(like, least_s / micro, unit)

    def _each(self, ways: int) -> Sequence[int]:
        """Samples of a rank in a microbatch; of several options some may be too many."""
        return self.options.micros or sizes(self.samples, ways)

    def refined(self, frame: Frame) -> Frame:
        """The same one, of one kind of chip, with what a step does once."""
        (section,) = frame.sections
        b, part = frame.micro // section.ways, frame.micro / self.samples
        unit = self.meshes.unit(section.pool, inner_of(section.axes), section.recompute, b)
        ends_s = min(self.meshes.ends_s(section, b, part), unit.ends_s)
        unit = self.meshes.unit_with_once(section, b, part)._replace(ends_s=ends_s)
        least_s = self._alone_s(unit, section) / frame.micro
        least_s = max(least_s, self.crossings.inside_s(section))
        return self._promising(frame._replace(rough=False), least_s, unit)

    def _promising(self, frame: Frame, least_s: float, unit: Unit) -> Frame:
        """It with a bound of its own, of a sample."""
        (section,) = frame.sections
        return frame._replace(
            per_sample_s=least_s,
            late_s=least_s * frame.stretch,
            speeds=((1 / unit.layer_s, section.meshes),),
            num_layers=self.num_layers + unit.ends,
            forward=unit.forward,
            backward=unit.backward,
        )

    def _alone_s(self, unit: Unit, section: Section) -> float:
        """Of a microbatch on the fullest of a section's meshes, at least."""
        fullest = -(-self.num_layers // section.meshes)
        return unit.layer_s * max(fullest, (self.num_layers + unit.ends) / section.meshes)

    def _unmade(self, section: Section, b: int, micro: int) -> ReasonKind | None:
        """Why there is no frame of a section by itself, if so."""
        if not (self.options.any_shape or self.meshes.allows(section, micro)):
            return "shape"
        return None if self._holds(section, b, micro) else "memory"

    def mixed(self, pools: Sequence[int], per_sample_s: float) -> list[Frame]:
        """Pipelines through several kinds, of which the bound is below ``per_sample_s``."""
        from weft.planner.search.combined import Wanted, combined

        keep = round((MOST_COMBINATIONS * (MORE if self.meshes.few else 1)) ** (1 / len(pools)))
        any_number = self.costs.num_layers + 2
        most_meshes = min(any_number, self.options.max_stages or any_number)
        micros = self.options.micros
        wanted = Wanted(self.num_layers, self.samples, most_meshes, per_sample_s, micros)
        found: list[Combined] = []
        for bound, micro in self._by_bound(pools):
            number = prod(len(self.meshes.speeds(pool, micro)) for pool in pools)
            if bound >= per_sample_s:
                self.unmade["bound"] += number
                continue
            tops = [self.rates(pool, micro, keep) for pool in pools]
            if all(len(some) < keep for some in tops):
                number = prod(map(len, tops))
            self.unmade["limit"] += number - prod(map(len, tops))
            if all(tops):
                found.append(combined(tops, micro, wanted, self.crossings, self.unmade))
        return list(self._most_promising(found))

    def _most_promising(self, found: Sequence[Combined]) -> Iterator[Frame]:
        """Frames of them, and of no others."""
        import numpy as np  # what commands that answer at once do without

        from weft.planner.search.combined import in_order

        every = [(each, number) for each in found for number in range(len(each.about_s))]
        self.unmade["limit"] += max(len(every) - MOST_FRAMES, 0)
        if not found:
            return
        about_s = np.concatenate([each.about_s for each in found])
        deep = np.concatenate([each.num_meshes for each in found])
        for place in in_order(about_s, deep, shallow_first=not self.meshes.few)[:MOST_FRAMES]:
            each, number = every[place]
            yield self._through(each.rates(number), float(each.per_sample_s[number]), each.micro)

    def _by_bound(self, pools: Sequence[int]) -> Iterator[tuple[float, int]]:
        """What a sample takes at least, by microbatch."""
        for micro in self.micros(pools):
            speeds = [self.meshes.speeds(pool, micro) for pool in pools]
            if all(speeds):
                best = sum(float(some.layers_per_s[0]) for some in speeds)
                yield self.num_layers / (micro * best), micro

    def _rates(self, pool: int, micro: int, number: int) -> list[Rate]:
        """Sections that have memory for anything: the fastest, and the best of each depth."""
        from weft.planner.search.combined import Rate

        found: list[Rate] = []
        every = self.meshes.speeds(pool, micro)
        allowed = max(self.options.micros or (micro,))
        for section in every.in_turn(shallow_first=not self.meshes.few):
            if len(found) == number:
                break
            b = samples_at_once([section], micro)
            most = self.most(section, b, micro) if b <= allowed else -1.0
            if most >= 0:
                unit = self.meshes.unit_with_once(section, b, micro / self.samples)
                insort(found, Rate.of(unit, most, section), key=lambda rate: -rate.layers_per_s)
        return found

    def most(self, section: Section, b: int, micro: int) -> float:
        """Layers that fit at best, with the levels of ZeRO that save most, where a rank has ``b``
        samples of ``micro``; below 0 where none do."""
        lean = self._leanest(section)
        return max((self._capacity(each, b, micro) for each in lean), default=-1.0)

    def _through(self, rates: Sequence[Rate], per_sample_s: float, micro: int) -> Frame:
        """Of sections of several kinds."""
        each = ((rate.layers_per_s / rate.section.meshes, rate.section.meshes) for rate in rates)
        sections = tuple(rate.section for rate in rates)
        units = [rate.unit for rate in rates]
        return self._frame(per_sample_s, micro, sections, tuple(sorted(each, reverse=True)), units)

    def _frame(
        self,
        per_sample_s: float,
        micro: int,
        sections: tuple[Section, ...],
        speeds: tuple[tuple[float, int], ...],
        units: Sequence[Unit],
    ) -> Frame:
        """Counted once, for it is asked often."""
        chips = sum(section.num_chips for section in sections)
        ways = factorial(len(sections)) * sum(
            prod(len(self.costs.zero_levels(section)) for section in each)
            for each in self.costs.apart(sections).values()
        )
        stretch = self.costs.problem.knowledge.stretch(chips)
        return Frame(
            per_sample_s=per_sample_s,
            micro=micro,
            sections=sections,
            num_meshes=sum(section.meshes for section in sections),
            ways=ways,
            stretch=stretch,
            late_s=per_sample_s * stretch,
            speeds=speeds,
            num_layers=float(self.num_layers),
            forward=min(unit.forward for unit in units),
            backward=min(unit.backward for unit in units),
        )

    def _holds(self, section: Section, b: int, micro: int) -> bool:
        """There may be memory for the whole model."""
        enough = self.num_layers
        return any(
            self._capacity(each, b, micro, enough=enough) >= enough
            for each in self._leanest(section)
        )

    def _leanest(self, section: Section) -> Iterator[Section]:
        """With two levels of ZeRO, of which one saves most, and with the one that needs domains."""
        for level in self.costs.zero_levels(section)[:-3:-1]:
            yield section._replace(zero=level)
        if self.costs.num_pipelines > 1:
            for (only,) in list(self.costs.apart((section,)).values())[1:]:
                for level in self.costs.zero_levels(only)[-1:]:
                    yield only._replace(zero=level)

    def _capacity(self, section: Section, b: int, micro: int, *, enough: float = 0.0) -> float:
        """Layers that fit at best: a mesh holds a microbatch for each mesh behind it, and its own.

        Meshes are taken in four blocks, each as if it held what the last of the block does.
        ``enough``: where each with a single microbatch cannot have that many, less is said.
        """
        pool, inner = section.pool, inner_of(section.axes)
        working, kept = self.meshes.activations(pool, inner, section.recompute, b)
        apart = min(section.shard_ways, 1)
        runtime, whole, divided = self.meshes.state(pool, inner, section.zero, apart)
        ways = section.ways if apart else dict(section.axes)[SAMPLES]
        state = (whole + divided / ways) * (1 - 1e-12)
        free = self.costs.budgets[section.pool] - working - runtime
        if section.meshes * free < enough * (state + kept):
            return -1.0
        many, meshes, total = max(self.fewest // micro, 1), section.meshes, 0.0
        for first, end in _blocks(meshes):
            held = min(first + 1, many)
            each = state + held * kept  # nothing, where all of it is elsewhere
            fits = (free // each if each else float(self.num_layers)) if free > 0 else -1
            total += (end - first) * min(fits, self.num_layers)
        return total

    def _placed(self, pool: int) -> Iterator[Section]:
        chips = self.costs.pools[pool].num_chips
        groups = [(inner, num_ranks(inner)) for inner in self.meshes.allowed_inner(pool)]
        pairs = [(*both, n) for both in groups for n in self.meshes.counts(chips // both[1])]
        for inner, group, meshes in pairs:
            samples = self.samples // share(inner, "samples")
            for ways in self._ways(min(chips // (group * meshes), samples)) if samples else ():
                section = Section(pool, mesh_axes(ways, inner), meshes)
                if not self.meshes.runs(inner):
                    self.unmade["axis"] += 1
                elif self.meshes.fills(section):
                    yield section
                else:
                    self.unmade["shape"] += 1

    def _ways(self, most: int) -> list[int]:
        """Above a dozen, the most, powers of two, and the largest divisor of the samples."""
        if most <= ALL_UP_TO:
            return list(range(1, most + 1))
        divisor = max(n for n in self._divisors if n <= most)
        return sorted({*powers(most), most - 1, most, divisor})

    @cached_property
    def _divisors(self) -> list[int]:
        """Of the samples."""
        return divisors(self.samples)


@lru_cache(maxsize=1 << 8)
def _most_chunks(schedules: tuple[ScheduleName, ...]) -> tuple[int, int]:
    """Stages of a mesh at most, of those with backward in halves and of others; 0 of none."""
    named = [SCHEDULES[name] for name in schedules]
    every = ([s.chunks for s in named if s.splits_backward == split] for split in (True, False))
    split, others = (max(each, default=0) for each in every)
    return split, others


@lru_cache(maxsize=1 << 10)
def _blocks(meshes: int) -> tuple[tuple[int, int], ...]:
    """Four of like length, those that are not empty; of one mesh, that one."""
    if meshes == 1:
        return ((0, 1),)
    cuts = [meshes * block // 4 for block in range(5)]
    return tuple((first, end) for first, end in pairwise(cuts) if first < end)

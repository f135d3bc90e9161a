"""Seconds that no plan of a search can beat: all chips at their best at once, layers in any parts.

What is left of a plan is what none can do without. Each chip computes, with its layers, a part of
the model for all samples: at most at the rate of the best mesh that it can be part of, as deep a
pipeline as that is, whose first microbatch comes down and whose last goes back; and sums what
others of its mesh have of the same layers. It holds no more layers than it has memory for. Kinds
of chip that go together send to each other what they cannot do without: all samples, in a pipeline
through them; or sums of all gradients, in pipelines side by side. Nobody waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import chain, product
from math import ceil, inf
from operator import attrgetter
from typing import NamedTuple

from weft.cost.memory import trained_params
from weft.cost.sends import border_bytes
from weft.cost.traffic import Fabric, Far
from weft.cost.work import Axes, share
from weft.plan.plan import Recompute
from weft.planner.problem import Problem
from weft.planner.search.choice import FEW_TO_CUT, Section, mesh_axes, num_ranks
from weft.planner.search.costs import Costs, Held, Rank
from weft.planner.search.frames import Space
from weft.planner.search.meshes import Meshes, powers
from weft.schedules.registry import SCHEDULES

FEW_UNITED = 16
"""Chips of several kinds that may be one mesh."""
FINE = 1e-6
"""Relative, of the answer."""


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


class Sent(NamedTuple):
    """What a kind of chip cannot do without where it is not the only one."""

    from_s: float = 0.0
    """What crosses to another kind takes at least as long."""
    beside_s: float = 0.0
    """Added to what it computes."""


class Relaxed:
    """A problem without what makes it hard: what it says holds for the plans that ``search`` looks
    at, with whatever it then refines in them. The fastest may well take longer."""

    def __init__(self, problem: Problem) -> None:
        options = problem.options
        self.problem, self.samples = problem, problem.workload.samples
        pools = problem.cluster.pools
        self.many = min(len(pools), options.max_pipelines or len(pools), self.samples)
        self.alone = Costs(problem, 1)
        self.beside = Costs(problem, self.many)
        for costs in (self.alone, self.beside):  # few layers on a mesh may all stay
            costs.expert_layers = problem.workload.spec.num_layers + 1
        self.num_layers = self.alone.num_layers
        fewest = self.samples if self.many == 1 else 1
        self.meshes = Meshes(self.alone)
        self.roomy = Space(Meshes(self.beside), self.samples, fewest)
        named = [SCHEDULES[name] for name in options.schedules]
        self.chunks = max(each.chunks for each in named)
        self.splits = any(each.splits_backward for each in named)
        self.mixed = options.mixed_recompute and "full" in options.recompute
        unlike = len({pool.chip.name for pool in pools}) > 1 and options.unlike_meshes
        self.united = unlike and problem.cluster.world_size <= FEW_UNITED
        """Unlike chips may be one mesh, where state is wherever there is room."""
        elsewhere = {options.param_tiers[0], options.expert_tiers[0]} - {"device"}
        self.any_room = self.united or bool(elsewhere)
        """No kind's memory binds: unlike chips are one mesh, or parameters wait on hosts, of which
        pipelines side by side have none."""
        self._ends_s: Callable[[int], float] = cache(self._ends_of)
        self._best_first: Callable[[int], list[Deep]] = cache(self._by_rate)
        self._reached: Callable[[int], list[Reached]] = cache(self._reached_by)

    def least_s(self, pools: Iterable[int]) -> float:
        """Of a step on chips of these pools, or on part of them."""
        chosen = list(pools)
        kinds = {pool: self._reached(pool) for pool in chosen}
        if self._mixes or len(chosen) == 1:
            return self._least_s(kinds, dict.fromkeys(chosen, Sent()))
        alone = (self._least_s({pool: kinds[pool]}, {pool: Sent()}) for pool in chosen)
        through = {pool: Sent(from_s=self._crossing_kinds_s(pool, chosen)) for pool in chosen}
        beside = {pool: Sent(beside_s=self._sums_s(pool, chosen)) for pool in chosen}
        several = [beside] if self.many > 1 else []
        return min(*alone, *(self._least_s(kinds, sent) for sent in (through, *several)))

    def _least_s(self, kinds: Mapping[int, Sequence[Reached]], sent: Mapping[int, Sent]) -> float:
        """Of a step on chips that reach so much, and send so much."""
        low, high = 0.0, 1.0
        while not self._done(kinds, sent, high):
            low, high = high, 2 * high
            if high == inf:
                return inf
        while high - low > FINE * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._done(kinds, sent, middle) else (middle, high)
        known = self.problem.knowledge
        return known.stretch(self._fewest(kinds, low)) * (low + known.software.step_s)

    def _crossing_kinds_s(self, pool: int, pools: Sequence[int]) -> float:
        """Of one pipeline through several kinds: what the border to another one carries one way,
        where all chips of both have a part in it."""
        if self.problem.options.border:
            return 0.0
        return min(self._between_s(pool, other) for other in pools if other != pool)

    def _between_s(self, pool: int, other: int) -> float:
        one, two = (self.alone.pools[number] for number in (pool, other))
        if one.site != two.site:
            return Far.between(one.site, two.site).seconds(self._whole_bytes)
        fabrics = self._fabric(pool), self._fabric(other)
        near = bool(one.node) and one.node == two.node
        rates = (each.inside_bytes_s if near else each.across_bytes_s for each in fabrics)
        return self._whole_bytes / min(one.num_chips, two.num_chips) / min(rates)

    def _sums_s(self, pool: int, pools: Sequence[int]) -> float:
        """Of several pipelines: what nothing hides of sums of gradients among them.

        Each pipeline has all parameters, so that one of its ranks at least has as many as a mean
        one. Whichever ranks are domains, of a gradient that two ranks or more of other nodes have a
        part leaves each: with n of them twice ``(n - 1) / n`` of what the rank's like divide, which
        are no more than its mesh has. The largest pipeline has all kinds but one.
        """
        software = self.problem.knowledge.software
        rate = {n: self.alone.pools[n].num_chips * self._fabric(n).across_bytes_s for n in pools}
        fewer = min(each for number, each in rate.items() if number != pool)
        most = sum(rate.values()) - (0.0 if self._may_cut else fewer)
        return (1 - software.data_hidden) * software.grad_bytes * self._trained / most

    @cached_property
    def _mixes(self) -> bool:
        """Unlike chips may be in one mesh, which sends otherwise."""
        few = self._fewest_together <= FEW_UNITED
        return self.alone.shape.experts is not None or (few and self.problem.options.unlike_meshes)

    @cached_property
    def _may_cut(self) -> bool:
        """Parts of one kind of chip may be in several pipelines."""
        return self._fewest_together <= FEW_TO_CUT

    @cached_property
    def _fewest_together(self) -> int:
        """Chips of two kinds."""
        return sum(sorted(pool.num_chips for pool in self.alone.pools)[:2])

    @cached_property
    def _trained(self) -> float:
        """Parameters of the model outside experts."""
        section = Section(0, mesh_axes(1, ()), 1)
        whole = Held(self.num_layers, True, True).of(self.alone.choice(section, 1))
        return trained_params(self.alone.shape, whole)[0]

    @cached_property
    def _whole_bytes(self) -> float:
        """That go over a border one way, of all samples."""
        work = self.problem.workload
        return border_bytes(work.precision, self.samples, work.seq_len, self.alone.shape.d_model)

    def _fabric(self, pool: int) -> Fabric:
        return self.alone.hardware(pool, self.alone.pools[pool].chips_per_node).fabric

    def _done(
        self, kinds: Mapping[int, Sequence[Reached]], sent: Mapping[int, Sent], seconds: float
    ) -> bool:
        """All layers of all samples, in so long, with embedding and head on whichever kind has most
        time for them.

        Of layers, and embedding and head as so many layers as they take as long as there, each kind
        does what ``layers`` says; all kinds then do those of the model, and at least as many more
        as the ends are where they are fewest.
        """
        likes = {pool: self._most_beside(pool, sent[pool], seconds) for pool in kinds}
        each = {
            pool: min(most_layers(kind, seconds, ends=False), likes[pool])
            for pool, kind in kinds.items()
        }
        total = sum(each.values())
        most = max(
            total - each[pool] + min(most_layers(kind, seconds, ends=True), likes[pool])
            for pool, kind in kinds.items()
        )
        return most >= self.num_layers

    def _most_beside(self, pool: int, sent: Sent, seconds: float) -> float:
        """Layers of all samples that a kind has time for, beside what it sends to others."""
        if seconds < sent.from_s or not self._best_first(pool):
            return 0.0
        if not sent.beside_s:
            return inf
        each_s = self.samples / self._best_first(pool)[0].rate
        return max(seconds - sent.beside_s, 0.0) / each_s

    def _fewest(self, kinds: Mapping[int, Sequence[Reached]], seconds: float) -> int:
        """Chips that could do the layers in that time, the fastest first."""
        number, left = 0.0, float(self.num_layers)
        numbers = {pool: self.alone.pools[pool].num_chips for pool in kinds}
        each = [
            (most_layers(kind, seconds, ends=False) / numbers[pool], numbers[pool])
            for pool, kind in kinds.items()
        ]
        for layers, chips in sorted(each, reverse=True):
            if layers <= 0 or left <= 0:
                break
            used = min(chips, left / layers)
            number, left = number + used, left - used * layers
        return max(1, ceil(number - FINE))

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
        enough, deeps = inf, self._best_first(pool)
        most = ((deep, range(deep.ways, deep.ways - 1, -1)) for deep in deeps)
        fewer = ((deep, range(deep.ways - 1, 0, -1)) for deep in deeps)
        for deep, numbers in chain(most, fewer):
            for ways in numbers:
                if self.samples / self._rate(deep, ways) >= enough:
                    break
                found.append(self._with(deep, ways))
                enough = min(enough, self._enough(found[-1], pool))
        return found

    def _enough(self, reached: Reached, pool: int) -> float:
        """Seconds of a layer with which no other does more in any time that a step may take.

        Where there is room for everything and what crosses never holds it up, its layers, ``(t -
        ends) / seconds``, grow the faster with time: they are more at all times if they are at the
        soonest end.
        """
        soonest = self._soonest_s
        if reached.most < self.num_layers or max(reached.from_s, reached.ends_s) >= soonest:
            return inf
        return reached.seconds * (soonest - self._ends_s(pool)) / (soonest - reached.ends_s)

    @cached_property
    def _soonest_s(self) -> float:
        """Seconds of all layers, with every chip at its best rate."""
        pools = range(len(self.alone.pools))
        rates = [self._best_first(pool)[0].rate for pool in pools if self._best_first(pool)]
        return self.samples * self.num_layers / sum(rates) if rates else inf

    def _by_rate(self, pool: int) -> list[Deep]:
        """The highest first."""
        return sorted(self._deep(pool), key=attrgetter("rate"), reverse=True)

    def _deep(self, pool: int) -> Iterator[Deep]:
        """Every depth and way to divide layers, with samples on as many ranks as there are."""
        options, chips = self.problem.options, self.alone.pools[pool].num_chips
        each = options.micros or powers(self.samples)
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

    def _with(self, deep: Deep, ways: int) -> Reached:
        section = Section(deep.pool, mesh_axes(ways, deep.inner), deep.meshes, deep.recompute)
        micro = deep.each * section.ways
        roomy = "full" if self.mixed else deep.recompute
        most = self.roomy.most(section._replace(recompute=roomy), deep.each, micro)
        times = self.samples / self._together(deep, ways)
        kept = list(self._of_a_layer(section, deep.each))
        return Reached(
            seconds=min(times * layer_s + once_s / deep.meshes for layer_s, once_s, _ in kept),
            most=inf if self.any_room else max(most, 0.0),
            from_s=self._crossing_s(section),
            ends_s=self._ends_s(deep.pool) + min(once_s for *_, once_s in kept) / deep.meshes,
        )

    def _ends_of(self, pool: int) -> float:
        """Seconds of embedding and head of all samples, with all chips at it."""
        each = []
        for deep in self._best_first(pool):
            unit, inner = self.meshes.unit(*deep.unit), deep.inner
            samples = deep.each * share(inner, "samples") / num_ranks(inner)
            each.append((unit.embed_s + unit.head_s) / samples)
        return min(each, default=0.0) * self.samples / self.alone.pools[pool].num_chips

    def _of_a_layer(self, section: Section, each: int) -> Iterator[tuple[float, float, float]]:
        """Seconds for a microbatch, and once a step, at each level of ZeRO; and once a step of
        embedding and head."""
        pool, layers = section.pool, self.num_layers
        per_node = self.alone.pools[pool].chips_per_node
        step_s = self.problem.knowledge.software.step_s
        for (one,) in self.alone.apart((section,)).values():
            for level in self.alone.zero_levels(one):
                choice = self.alone.choice(one._replace(zero=level), each)
                rank = Rank(pool, per_node, choice)
                inside, whole = (
                    self.alone.times(rank, Held(layers, ends, ends)) for ends in (False, True)
                )
                once_s = max(inside.update_s - step_s, 0.0)
                ends_s = max(whole.update_s - inside.update_s, 0.0)
                yield inside.whole_s / layers, once_s / layers, ends_s

    def _crossing_s(self, section: Section) -> float:
        """What a border between nodes carries one way, where there has to be one."""
        pool = self.alone.pools[section.pool]
        inside = section.num_chips <= pool.chips_per_node or section.meshes == 1
        if inside or self.problem.options.border:
            return 0.0
        rate = self._fabric(section.pool).across_bytes_s
        return self._whole_bytes / num_ranks(section.axes) / rate


def most_layers(kind: Sequence[Reached], seconds: float, *, ends: bool) -> float:
    """Of a model that chips of a kind can do in so long."""
    return max((each.layers(seconds, ends=ends) for each in kind), default=0.0)

"""Seconds that no plan of a search can beat: all chips at their best at once, layers in any parts.

What is left of a plan is what none can do without. Kinds of chip are arranged in pipelines, side by
side or alone. Each kind does what ``Kinds`` says. Through a pipeline of several kinds all its
samples cross from one to another; pipelines side by side divide the samples as they are fast, and
send each other sums of all gradients, which hide behind one microbatch at most. Nobody waits for
another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, combinations
from math import ceil, inf
from typing import NamedTuple

from weft.cluster.view import ClusterView
from weft.cost.choice import Group
from weft.cost.memory import trained_params
from weft.models.registry import shape_of
from weft.planner.problem import Problem
from weft.planner.search.arrangements import Arrangement, partitions
from weft.planner.search.choice import FEW_TO_CUT, Section, mesh_axes
from weft.planner.search.costs import KnownCosts
from weft.planner.search.reached import Kinds, most_layers
from weft.planner.search.united import FEW_CHIPS

MOST_KINDS = 6
"""Of which all arrangements are bounded; of more kinds as if nothing were sent among them."""
FINE, COARSE = 1e-6, 1e-4
"""Relative, of the answer; and of a part of the samples."""
TINY = 1e-12


class Layer(NamedTuple):
    """Of a kind of chip in one of several pipelines."""

    computing_s: float
    """A layer of all samples, at its best."""
    sums_s: float
    """Its gradients, with those of the other pipelines."""
    seen: float
    """Part of what hides best that does not hide."""

    def beside(self, part: float) -> float:
        """Seconds at least of a layer of such a part of the samples and its sums.

        Of what takes ``s`` beside ``c`` of computing, at most the part ``1 - seen`` hides, and no
        more than that part of ``c``: ``c + seen s`` or more, and ``s + seen c``.
        """
        computing_s = part * self.computing_s
        return max(computing_s + self.seen * self.sums_s, self.sums_s + self.seen * computing_s)


class Relaxed:
    """A problem without what makes it hard: what it says holds for the plans that ``search`` looks
    at, with whatever it then refines in them. The fastest may well take longer."""

    def __init__(self, problem: Problem, known: KnownCosts | None = None) -> None:
        options, pools = problem.options, problem.cluster.pools
        self.problem, self.pools, self.samples = problem, pools, problem.workload.samples
        self.many = min(len(pools), options.max_pipelines or len(pools), self.samples)
        self.unlike = len({pool.chip.name for pool in pools}) > 1 and options.unlike_meshes
        self.has_experts = shape_of(problem.workload.spec).experts is not None
        elsewhere = {options.param_tiers[0], options.expert_tiers[0]} - {"device"}
        one_mesh = self.has_experts and self.unlike and problem.cluster.world_size <= FEW_CHIPS
        # Parameters that wait on hosts leave room; unlike chips as one mesh have it where they may.
        any_room = bool(elsewhere) or one_mesh
        self.kinds = Kinds(problem, self.many, known or KnownCosts(), any_room=any_room)
        self.num_layers = self.kinds.num_layers
        self._through_s: Callable[[tuple[int, ...]], float] = cache(self._through)
        self._apart_s: Callable[[tuple[int, ...]], float] = cache(self._apart)

    def least_s(self, pools: Iterable[int]) -> float:
        """Of a step on chips of these pools, or on part of them."""
        chosen = tuple(pools)
        if len(chosen) == 1 or self.has_experts or len(chosen) > MOST_KINDS:
            return self._late(chosen, self._apart_s(chosen))
        parts = chain(*(combinations(chosen, n) for n in range(1, len(chosen) + 1)))
        every = [*parts]
        least = min([inf, *chain(*map(self._united_s, every))])
        for arrangement in chain(*map(partitions, every)):
            if len(arrangement) <= self.many:
                least = min(least, self.of(arrangement, least))
        return least

    def of(self, arrangement: Arrangement, most: float = inf) -> float:
        """Of a step of pipelines on these pools, which none is in two of; of no more than ``most``
        interest."""
        if self.has_experts:  # unlike chips may be in one mesh, which sends otherwise
            chosen = tuple(chain(*arrangement))
            return self._late(chosen, self._apart_s(chosen))
        if len(arrangement) == 1:
            return self._late(arrangement[0], self._through_s(arrangement[0]))
        lines = [(group, self._layer_s(group, arrangement)) for group in arrangement]

        def done(seconds: float) -> bool:
            return sum(self._part(group, each, seconds) for group, each in lines) >= 1

        if most < inf and not done(most):
            return most
        return self._late(tuple(chain(*arrangement)), soonest(done))

    def _part(self, group: tuple[int, ...], layers: Sequence[Layer], seconds: float) -> float:
        """Of all samples, which a pipeline has time for beside its sums, at most."""
        high, low = min(1.0, seconds / self._through_s(group)), 0.0

        def enough(part: float) -> bool:
            """All layers of such a part of the samples."""
            every = (max(each.beside(part), TINY) for each in layers)
            return sum(seconds / each_s for each_s in every) >= self.num_layers

        if enough(high):
            return high
        while high - low > COARSE * high:
            middle = (low + high) / 2
            low, high = (middle, high) if enough(middle) else (low, middle)
        return high

    def _layer_s(self, group: Sequence[int], arrangement: Arrangement) -> list[Layer]:
        """Of each kind of a pipeline."""
        others = [pool for pool in chain(*arrangement) if pool not in group]
        many = len(arrangement)
        return [
            Layer(
                computing_s=self.samples / max(self._rate(pool), TINY),
                sums_s=self._sums_bytes(pool, many) / self.num_layers / self._way_out(pool, others),
                seen=1 - self.kinds.software(pool).data_hidden,
            )
            for pool in group
        ]

    def _late(self, pools: Sequence[int], seconds: float) -> float:
        """With what a step takes besides: the last of so many chips is late."""
        if seconds == inf:
            return inf
        step_s = min(self.kinds.software(pool).step_s for pool in pools)
        stretch = self.problem.knowledge.stretch(self._fewest(pools, seconds))
        return stretch * (seconds + step_s)

    def _through(self, pools: tuple[int, ...]) -> float:
        """Seconds of a pipeline through all of these kinds."""
        from_s = max((self._crossing_s(pool, pools) for pool in pools), default=0.0)
        return max(self._apart_s(pools), from_s)

    def _apart(self, pools: tuple[int, ...]) -> float:
        """Likewise, as if kinds sent each other nothing."""
        return soonest(lambda seconds: self._done(pools, seconds))

    def _done(self, pools: Sequence[int], seconds: float) -> bool:
        """All layers of all samples, in so long, with embedding and head on whichever kind has most
        time for them.

        Of layers, and embedding and head as so many layers as they take as long as there, each kind
        does what ``layers`` says; all kinds then do those of the model, and at least as many more
        as the ends are where they are fewest.
        """
        reached = {pool: self.kinds.reached(pool) for pool in pools}
        each = {pool: most_layers(kind, seconds, ends=False) for pool, kind in reached.items()}
        total = sum(each.values())
        most = max(
            total - each[pool] + most_layers(kind, seconds, ends=True)
            for pool, kind in reached.items()
        )
        return most >= self.num_layers

    def _rate(self, pool: int) -> float:
        """Samples times layers a second."""
        best = self.kinds.best_first(pool)
        return best[0].rate if best else 0.0

    def _crossing_s(self, pool: int, pools: Sequence[int]) -> float:
        """Of one pipeline through several kinds: what the border to another one carries one way,
        where all chips of both have a part in it."""
        if self.problem.options.border or len(pools) == 1:
            return 0.0
        between, chips = self.kinds.roomy.crossings.between, self.pools[pool].num_chips
        return self.samples * min(
            between(pool, other, min(chips, self.pools[other].num_chips))
            for other in pools
            if other != pool
        )

    def _sums_bytes(self, pool: int, many: int) -> float:
        """Of sums of gradients that each of so many pipelines sends the others, hidden or not.

        Whichever ranks are domains, of a gradient of which n pipelines have a part ``(n - 1) / n``
        leaves each, and then as much of another sum, or of the parameter.
        """
        software = self.kinds.software(pool)
        twice = software.grad_bytes + min(software.grad_bytes, software.weight_bytes)
        return twice * (many - 1) / many * self._trained()

    def _way_out(self, pool: int, others: Iterable[int]) -> float:
        """Bytes a second from all chips of a kind to chips of others."""
        fabric, node = self.kinds.fabric(pool), self.pools[pool].node
        near = bool(node) and any(self.pools[other].node == node for other in others)
        each = max(fabric.across_bytes_s, fabric.inside_bytes_s * near)
        return self.pools[pool].num_chips * each

    def _united_s(self, pools: tuple[int, ...]) -> Iterator[float]:
        """Of meshes of unlike chips, where these may be one; and where some may be cut."""
        chips = sum(self.pools[pool].num_chips for pool in pools)
        if len(pools) > 1 and chips <= FEW_TO_CUT:
            yield self._late(pools, self._apart_s(pools))
        if self.unlike and len(pools) > 1 and chips <= FEW_CHIPS:
            yield self._one_mesh(pools)

    def per_sample_s(self, pools: tuple[int, ...]) -> float:
        """Of one of several pipelines, through these."""
        return 0.0 if self.has_experts else self._through_s(pools) / self.samples

    def of_one_mesh(self, part: ClusterView) -> float:
        """Of a step of one mesh of all chips of these pools."""
        if self.has_experts:
            return 0.0
        return self._one_mesh(tuple(self.pools.index(pool) for pool in part.pools))

    def _one_mesh(self, pools: tuple[int, ...]) -> float:
        """Samples go where links leave most time for them."""
        group = Group(sum(self.pools[pool].num_chips for pool in pools))
        kinds = [(self.kinds.samples_a_second(pool), *self._ring(pool, group)) for pool in pools]

        def done(seconds: float) -> bool:
            samples = 0.0
            for rate, sums_s, back_s, seen in kinds:
                left_s = seconds - seen * back_s
                if left_s < sums_s:
                    return False
                hidden_s = (left_s - sums_s) / max(seen, TINY)
                samples += rate * max(0.0, min(left_s - seen * sums_s, hidden_s))
            return samples >= self.samples

        return self._late(pools, soonest(done))

    def _ring(self, pool: int, group: Group) -> tuple[float, float, float]:
        """Seconds in which a rank of a group that holds the model gets its part of the sums of
        gradients, and parameters come back; and the part that does not hide of what hides best."""
        fabric, software = self.kinds.fabric(pool), self.kinds.software(pool)
        fabric = replace(fabric, chips_per_node=self.problem.cluster.chips_with(self.pools[pool]))
        params = self._trained(ends=True)
        sums_s = fabric.seconds("reduce_scatter", software.grad_bytes * params, group)
        back_s = fabric.seconds("all_gather", software.weight_bytes * params, group)
        return sums_s, back_s, 1 - software.data_hidden

    def _fewest(self, pools: Sequence[int], seconds: float) -> int:
        """Chips that could do the layers in that time, the fastest first."""
        number, left = 0.0, float(self.num_layers)
        numbers = [self.pools[pool].num_chips for pool in pools]
        layers = [seconds * self._rate(pool) / self.samples for pool in pools]
        each = [(most / chips, chips) for most, chips in zip(layers, numbers, strict=True)]
        for most, chips in sorted(each, reverse=True):
            if most <= 0 or left <= 0:
                break
            used = min(chips, left / most)
            number, left = number + used, left - used * most
        return max(1, ceil(number - FINE))

    def _trained(self, *, ends: bool = False) -> float:
        """Parameters of all layers; with embedding and head."""
        costs = self.kinds.costs
        choice = costs.choice(Section(0, mesh_axes(1, ()), 1), 1)
        whole = choice.holding((0, costs.num_layers), embeds=ends, predicts=ends)
        return trained_params(costs.shape, whole)[0]


def soonest(done: Callable[[float], bool]) -> float:
    """The least time in which something is done that more time never undoes; no end where none."""
    low, high = 0.0, 1.0
    while not done(high):
        low, high = high, 2 * high
        if high == inf:
            return inf
    while high - low > FINE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if done(middle) else (middle, high)
    return low

"""Which meshes each kind of chip may form, and what they do at best: whatever samples there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from math import gcd, prod
from typing import TYPE_CHECKING, NamedTuple

from weft.axes.registry import AXES
from weft.cost.memory import StageMemory
from weft.cost.times import StageTimes
from weft.cost.work import Axes, share
from weft.models.registry import dims_of_model
from weft.plan.plan import Recompute, ZeroLevel
from weft.planner.problem import Shape
from weft.planner.search.choice import (
    FEW_CHIPS,
    INSIDE,
    LONG,
    SPREAD,
    Section,
    inner_of,
    leaves_rest,
    mesh_axes,
    near_ranks,
    nodes_for,
    num_ranks,
    used_parts,
)
from weft.planner.search.costs import Costs, Held, Rank
from weft.planner.validate import why_not
from weft.planner.whole_blocks import cut_block

if TYPE_CHECKING:
    from weft.planner.search.speeds import Speeds, Tried

DIVIDING_INSIDE = 1024
"""Chips up to which short samples are divided inside nodes too."""
ALL_UP_TO = 12
"""Every number of meshes and of data-parallel ranks up to this is tried; above, some."""


class Unit(NamedTuple):
    """Seconds for a microbatch with ZeRO that costs nothing, or with its part of a step's end."""

    layer_s: float
    ends_s: float
    """Of embedding and head."""
    forward_s: float
    """Of a layer's."""
    backward_s: float

    @property
    def ends(self) -> float:
        """Embedding and head, in layers."""
        return self.ends_s / self.layer_s

    @property
    def forward(self) -> float:
        """Part of a layer's."""
        return self.forward_s / self.layer_s

    @property
    def backward(self) -> float:
        """Part of a layer's."""
        return self.backward_s / self.layer_s


class AtLevel(NamedTuple):
    """One layer among all of a model, at one level of ZeRO."""

    rank: Rank
    layer_s: float
    """Of a microbatch."""
    once_s: float
    """Of a step: gradients are summed, parameters updated."""
    update_s: float
    """Of a step, of all layers, with what it takes whatever is in it."""


class Meshes:
    """Of a search; what is asked often with the same is kept."""

    def __init__(self, costs: Costs, alike: Meshes | None = None) -> None:
        """``alike``: of the same problem, with another number of pipelines side by side: what these
        do not change is asked there."""
        self.costs, self.options, self.num_layers = costs, costs.options, costs.num_layers
        self.few = sum(pool.num_chips for pool in costs.pools) <= FEW_CHIPS
        """Chips, so that there is time to look at much."""
        self._dims = dims_of_model(costs.workload.spec)
        self.runs: Callable[[Axes], bool] = cache(self._has_a_way)
        """Every axis has one to divide the model, beside those further inside."""
        self.allowed_inner: Callable[[int], list[Axes]] = cache(self._every_inner)
        self.inner: Callable[[int], list[Axes]] = cache(self._inner_that_runs)
        """Every combination of sizes, of a pool, that can be run."""
        self.speeds: Callable[[int, int], Speeds] = cache(self._speeds)
        self.layer_times: Callable[[int, Axes, Recompute, int], tuple[Rank, StageTimes]] = cache(
            self._layer_times_of
        )
        self.unit: Callable[[int, Axes, Recompute, int], Unit] = cache(self._unit_of)
        self.activations = cache(self._activations_of)
        self.state = cache(self._state_of)
        self.counts: Callable[[int], list[int]] = cache(self._counts_up_to)
        self._at_level: Callable[[Section, int, int], AtLevel] = cache(self._at_one_level)
        if alike is not None:
            self.runs, self.allowed_inner, self.inner = alike.runs, alike.allowed_inner, alike.inner
            self.speeds, self.unit, self.counts = alike.speeds, alike.unit, alike.counts
            self.activations, self.layer_times = alike.activations, alike.layer_times

    def _speeds(self, pool: int, micro: int) -> Speeds:
        """Of the sections for a microbatch that fewer ranks with the same layers would not serve as
        well."""
        from weft.planner.search.speeds import Speeds  # NumPy: others answer at once without it

        found = Speeds.of(pool, self._for_micro(pool, micro), self.options.recompute)
        if self.options.any_shape:
            return found
        return found.allowed(lambda section: self.allows(section, micro))

    def at_levels(self, section: Section, b: int) -> Iterator[AtLevel]:
        """For ``b`` samples a rank, at each level of ZeRO and with each choice of domains."""
        pool = self.costs.pools[section.pool]
        part = used_parts(pool, section)[0]
        for (one,) in self.costs.apart((section,)).values():
            for level in self.costs.zero_levels(one):
                yield self._at_level(one._replace(meshes=1, zero=level), part.chips_per_node, b)

    def ends_s(self, section: Section, b: int, part: float) -> float:
        """Of a microbatch, what embedding, head and first layers without experts add to the other
        layers at least, likewise: less than they compute where layers wait, for they hide some of
        that."""
        held, added = Held(self.num_layers, True, True), list[float]()
        for each in self.at_levels(section, b):
            whole = self.costs.times(each.rank, held)
            more_s = whole.whole_s - self.costs.num_later * each.layer_s
            added.append(more_s + part * (whole.update_s - each.update_s))
        return max(min(added), 0.0)

    def unit_with_once(self, section: Section, b: int, part: float) -> Unit:
        """Of microbatches with ``b`` samples a rank, each so large a part of a step's samples:
        its layers take that part of what they take once a step, too; at least, whatever ZeRO."""
        unit = self.unit(section.pool, inner_of(section.axes), section.recompute, b)
        every = self.at_levels(section, b)
        layer_s = min(each.layer_s + part * each.once_s for each in every)
        return unit._replace(layer_s=max(unit.layer_s, layer_s))

    def _at_one_level(self, section: Section, per_node: int, b: int) -> AtLevel:
        layers, pool = self.costs.num_later, section.pool
        choice = self.costs.choice(section, b)
        choice = choice._replace(expert_layers=layers + 1)  # few on a mesh may all stay
        rank = self.costs.rank(pool, per_node, choice)
        software = self.costs.hardware(pool, self.costs.pools[pool].chips_per_node).software
        update_s = self.costs.times(rank, Held(layers, False, False)).update_s
        return AtLevel(
            rank=rank,
            layer_s=self.costs.more_layers(rank, layers).whole_s / layers,
            once_s=max(update_s - software.step_s, 0.0) / layers,
            update_s=update_s,
        )

    def _unit_of(self, pool: int, inner: Axes, recompute: Recompute, b: int) -> Unit:
        """Of ``b`` samples a rank."""
        rank, layer = self.layer_times(pool, inner, recompute, b)
        ends = Held(0, True, False), Held(0, False, True)
        embed, head = (self.costs.times(rank, held) for held in ends)
        forward_s, whole_s = layer.forward_s, layer.whole_s
        ends_s = embed.whole_s + head.whole_s
        return Unit(whole_s, ends_s, forward_s, whole_s - forward_s)

    def _layer_times_of(
        self, pool: int, inner: Axes, recompute: Recompute, b: int
    ) -> tuple[Rank, StageTimes]:
        """A rank of ``unit``, and what it takes for a layer."""
        per_node = self.costs.pools[pool].chips_per_node
        section = Section(pool, inner, 1, recompute)
        rank = self.costs.rank(pool, per_node, self.costs.without_ways(section, b))
        return rank, self.costs.more_layers(rank, 1)

    def _activations_of(
        self, pool: int, inner: Axes, recompute: Recompute, b: int
    ) -> tuple[float, float]:
        """Bytes while a layer computes; kept of each layer by a microbatch."""
        layer = self._layer(Section(pool, inner, 1, recompute), b)
        return layer.whole.working, layer.each.total

    def _state_of(
        self, pool: int, inner: Axes, zero: ZeroLevel, apart: int
    ) -> tuple[float, float, float]:
        """Bytes at rest: of the runtime, of each layer, and what ranks divide of each layer;
        ``apart``: those of a pipeline alone."""
        layer = self._layer(Section(pool, inner, 1, zero=zero, shard_ways=apart), 1)
        return layer.whole.runtime, layer.whole.state, layer.divided.total * layer.part

    def _layer(self, section: Section, b: int) -> StageMemory:
        """Memory of one layer in the middle of the model, on a mesh that divides no samples."""
        choice = self.costs.choice(section, b)
        return self.costs.memory(section.pool, choice, Held(1, False, False))

    def _for_micro(self, pool: int, micro: int) -> Iterator[Tried]:
        recompute = self.options.recompute
        part = self.costs.pools[pool]
        parts = sorted({-(-micro // b) for b in some_parts(micro)})
        for inner, ways in product(self.inner(pool), parts):
            same, rest = divmod(ways, share(inner, "samples"))
            if rest:
                continue
            near, together = near_ranks(inner), num_ranks(inner) * same
            counts = self.counts(part.num_chips // together)
            counts = [meshes for meshes in counts if self._fills(pool, together * meshes, near)]
            if not counts:
                continue
            axes = mesh_axes(same, inner)
            each = -(-micro // ways)
            layer_s = [self.layer_times(pool, inner, r, each)[1].whole_s for r in recompute]
            yield axes, counts, layer_s

    def allows(self, section: Section, micro: int) -> bool:
        """Options leave that shape open."""
        shape = Shape(
            axes=dict(section.axes),
            meshes=section.meshes,
            micro=micro,
            recompute=section.recompute,
        )
        return self.options.allows(self.costs.pools[section.pool].chip.name, shape)

    def _inner_that_runs(self, pool: int) -> list[Axes]:
        return list(filter(self.runs, self.allowed_inner(pool)))

    def _has_a_way(self, inner: Axes) -> bool:
        spec = self.costs.workload.spec
        used = tuple(AXES[name] for name, size in inner if size > 1)
        workload = self.costs.workload
        narrow = workload.training.wide_products < 1
        if narrow and cut_block(spec, inner, workload.precision):
            return False
        return not any(why_not(spec, used[number:]) for number in range(len(used)))

    def _every_inner(self, pool: int) -> list[Axes]:
        return list(self._filling(pool))

    def _filling(self, pool: int) -> Iterator[Axes]:
        """Every combination of sizes that fills whole parts of a node and leaves all ranks work."""
        node, dims = self.costs.pools[pool].chips_per_node, self._dims
        most = min(node, self.options.max_split or node)
        ways = [n for n in range(1, most + 1) if node % n == 0]
        for sizes in product(ways, repeat=len(INSIDE)):
            axes = tuple(zip(INSIDE, sizes, strict=True))
            if node % prod(sizes) == 0 and all(AXES[name].allows(dims, n) for name, n in axes):
                for longer in (axes, *self._longer(pool, axes)):
                    yield longer
                    yield from self._spread(pool, longer)

    def _longer(self, pool: int, axes: Axes) -> Iterator[Axes]:
        """The same where tokens of each sample are divided too, over parts of a node or nodes; of
        short samples on many chips over nodes alone, for what divides weights serves inside them
        nearly as well."""
        part, group, problem = self.costs.pools[pool], num_ranks(axes), self.costs.problem
        most = min(part.num_chips // group, problem.token_parts)
        if not problem.divides_tokens and problem.cluster.world_size > DIVIDING_INSIDE:
            most *= group == part.chips_per_node
        for name in LONG:
            for n in range(2, most + 1):
                even = (
                    part.chips_per_node % (n * group) == 0 or n * group % part.chips_per_node == 0
                )
                if even and AXES[name].allows(self._dims, n):
                    yield ((name, n), *axes)

    def _spread(self, pool: int, axes: Axes) -> Iterator[Axes]:
        """The same where ranks that compute other samples hold other parts too, as many each."""
        part, group = self.costs.pools[pool], num_ranks(axes)
        for name in SPREAD:
            sizes = [d.size for d in self._dims if d.size and AXES[name].divides(d, "param")]
            even = gcd(*sizes)  # 0 where it divides nothing of the model
            for n in range(2, min(part.num_chips // group, even) + 1):
                if even % n == 0 and AXES[name].allows(self._dims, n):
                    yield ((name, n), *axes)

    def _counts_up_to(self, most: int) -> list[int]:
        """Above a dozen, those with which the fullest mesh has fewer layers, and one more."""
        layers = self.num_layers
        most = min(most, layers, self.options.max_stages or most)
        few = {-(-layers // n) + more for n in range(1, layers + 1) for more in (0, 1)}
        return [n for n in range(1, most + 1) if n <= ALL_UP_TO or n in few or n == most]

    def fills(self, section: Section) -> bool:
        """There are nodes for it, as ``used_parts`` has it."""
        part = self.costs.pools[section.pool]
        even = self._fills(section.pool, section.num_chips, section.together)
        return even or (self.options.leave_idle and leaves_rest(section, part))

    def _fills(self, pool: int, num_chips: int, together: int) -> bool:
        """With equally many chips each."""
        part = self.costs.pools[pool]
        if not self.options.leave_idle and num_chips != part.num_chips:
            return False
        return nodes_for(num_chips, together, part.num_nodes, part.chips_per_node) > 0


def powers(most: int) -> list[int]:
    """Of two, up to ``most``."""
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def divisors(number: int) -> list[int]:
    """Lowest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def sizes(samples: int, ways: int) -> list[int]:
    """Samples of a microbatch that each of so many ranks may have: powers of two, and all of its
    own, where every rank has as many."""
    own = samples // ways
    return sorted({*powers(own), *([] if samples % ways else [own])})


def some_parts(micro: int) -> list[int]:
    """Samples that a rank may have of a microbatch."""
    if micro <= 2 * ALL_UP_TO:
        return list(range(1, micro + 1))
    return sorted({part * n for n in powers(micro) for part in (1, 3) if part * n <= micro})

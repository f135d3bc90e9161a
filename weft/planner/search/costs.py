"""What the search asks about one stage, kept: the same functions that users see, asked once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import NamedTuple

from weft.cluster.cluster import HOST
from weft.cluster.view import Reach
from weft.cost.activations import stage_away
from weft.cost.choice import StageChoice, dtype_of, gathers_keys
from weft.cost.memory import StageMemory, experts_apart, stage_memory
from weft.cost.sends import border_bytes, border_times, carried_part
from weft.cost.times import BorderTimes, StageTimes, shortest
from weft.cost.timing import Hardware, stage_times
from weft.cost.traffic import Far
from weft.cost.work import StageWork, dividing, share
from weft.memory.tiers import keeps_apart
from weft.models.registry import shape_of
from weft.plan.plan import ZeroLevel
from weft.planner.casts import saves_bytes
from weft.planner.experts import PIECES
from weft.planner.problem import Problem
from weft.planner.search.choice import Apart, Section, nodes_for, num_ranks
from weft.planner.search.slopes import MeshTimes, Slope
from weft.recompute.asked import slabs_of
from weft.schedules.action import Kind


class Held(NamedTuple):
    """What one stage holds."""

    layers: int
    embeds: bool
    predicts: bool

    def of(self, choice: StageChoice, dense: int) -> StageChoice:
        """The choice with these: a model's first ``dense`` layers, which have no experts where
        others do, are with the embedding."""
        first = 0 if self.embeds else dense
        layers = first, first + self.layers
        return choice.holding(layers, embeds=self.embeds, predicts=self.predicts)


@dataclass(frozen=True, eq=False, slots=True)
class Rank:
    """One rank of a section: where it is, and what it does of whatever layers it gets.

    ``Costs.rank`` makes each once, so that what is kept by it is found without looking into it.
    """

    pool: int
    per_node: int
    """Chips of each node that the section uses."""
    choice: StageChoice
    """Without layers."""

    @property
    def ways(self) -> int:
        """Into which its mesh divides samples."""
        return share(self.choice.axes, "samples")

    def most(self, size: int) -> int:
        """Of so many samples those that it has at most."""
        return -(-size // self.ways)

    def carried(self, size: int) -> float:
        """Part of the bytes of so many samples that it carries over a border."""
        return carried_part(size, self.most(size), self.ways, self.choice.num_ranks)


Both = tuple[Rank, Rank]
"""On either side of a border."""
Ends = tuple[tuple[bool, bool], ...]
"""For each stage of a mesh, whether it is the model's first and its last."""


class Bytes(NamedTuple):
    """Of one stage on one rank: ``StageMemory`` in the few numbers that a search adds up."""

    state: float
    """All that stages of a rank do not share: parameters, gradients, optimizer state and logits;
    and the fragments that one keeps."""
    kept: float
    """By each microbatch that is held, fragments included."""
    working: float
    buffers: float
    border: float
    """By each tensor at a border."""
    runtime: float
    on_host: float
    """State that waits in the memory of the host."""
    away: float
    """Likewise, by each microbatch that is held."""


def _of_params(memory: StageMemory) -> float:
    """Bytes of parameters, of their gradients, and of what only updates need."""
    return memory.whole.state + memory.divided.state * memory.part


def _every_way(choice: StageChoice) -> Iterator[StageChoice]:
    """Of tokens to experts, and of neighbours that divide heads instead of tokens in attention."""
    work, parts = choice.work, share(choice.axes, "seq")
    pieces = [(work.expert_pieces, work.experts_at_once)]
    if share(choice.axes, "experts") > 1:
        pieces = [*product(PIECES, (False, True))]
    for (number, once), near in product(pieces, range(1, parts + 1)):
        if parts % near == 0:
            other = work._replace(expert_pieces=number, experts_at_once=once, head_ways=near)
            yield choice._replace(work=other)


class Costs:
    """Costs of a problem's stages, in so many pipelines side by side, at so many sites."""

    def __init__(self, problem: Problem, num_pipelines: int, sites: tuple[int, ...] = ()) -> None:
        workload, pools = problem.workload, problem.cluster.pools
        self.problem, self.workload, self.options = problem, workload, problem.options
        self.pools, self.num_layers = pools, workload.spec.num_layers
        self.num_pipelines, self.sites = num_pipelines, sites
        self.shape = shape_of(workload.spec)
        self.dense = self.shape.dense_layers
        """First layers that have no experts, of a model whose others have."""
        self.num_later = self.num_layers - self.dense
        """What bounds count of the layers: as if those first ones took and needed nothing."""
        part = problem.options.memory_part
        self.budgets = [pool.chip.memory_gib * 2**30 * part for pool in pools]
        """By pool: bytes of one chip that may be planned."""
        self.on_hosts = [
            (pool.host_gib or 0) * 2**30 * part / pool.chips_per_node for pool in pools
        ]
        """Likewise room of a chip in its host's memory."""
        self.rooms: dict[object, int] = {}
        """Most layers of a mesh, by all that decides; of the routes that ask."""
        self.choice: Callable[[Section, int], StageChoice] = cache(self._choice)
        """Of a stage on each of a section's meshes; with the samples of a rank, of a microbatch."""
        self.rank: Callable[[int, int, StageChoice], Rank] = cache(Rank)
        self.times: Callable[[Rank, Held], StageTimes] = cache(self._times)
        """One full microbatch, and what a step does once."""
        self.ragged: Callable[[Rank, int, Held], StageTimes] = cache(self._ragged)
        """Likewise, with a last microbatch of which the rank has so many samples."""
        self.bytes: Callable[[Rank, Held], Bytes] = cache(self._bytes)
        """Memory of a stage, apart from how many microbatches it holds."""
        self.hardware: Callable[[int, int], Hardware] = cache(self._hardware)
        """Chips and links of a section: of a pool, with so many chips a node."""
        self.border: Callable[[Both, tuple[int, int], Reach, Far | None], BorderTimes]
        self.border = cache(self._border)
        """Between stages on two meshes."""
        self.mesh_times: Callable[[Rank, Ends, Kind], MeshTimes] = cache(self._mesh_times)
        """Of one mesh."""
        self.apart: Callable[[tuple[Section, ...]], dict[Apart, tuple[Section, ...]]] = cache(
            self._apart
        )
        """By the way to make domains of a pipeline what its sections have of one."""
        self.expert_layers = 2
        """Whose experts are on the device at a time, where they are kept elsewhere."""
        self.any_ways = False
        """Times are the least of all ways of tokens to experts, and of keys to queries, each of
        them: for bounds of plans whose ways are chosen last."""
        self._state = workload.training.state(workload.precision)
        self._trained = workload.training.parts((0, self.shape.num_layers))
        self._eager = [pool.chip.device == HOST for pool in pools]
        both = False, True
        self._levels = {(a, e): self._zero_levels(alone=a, eager=e) for a in both for e in both}
        self._gathers_keys = [gathers_keys(pool.chip.device) for pool in pools]

    def asked(self, problem: Problem) -> Costs:
        """The same costs, all that is known of them kept, where only what is computed again is
        asked otherwise, or pools have more or fewer nodes."""
        other = copy(self)
        other.problem, other.options = problem, problem.options
        other.pools = problem.cluster.pools
        other.apart = cache(other._apart)
        return other

    def more_layers(self, rank: Rank, num_layers: int) -> StageTimes:
        """So many layers more after ``dense``, without what a stage takes whatever it computes."""
        some = self.times(rank, Held(num_layers, False, False))
        if not self.hardware(rank.pool, rank.per_node).software.stage_layers:
            return some
        return some.without(self.times(rank, Held(0, False, False)))

    def _hardware(self, pool: int, per_node: int) -> Hardware:
        part = replace(self.pools[pool], chips_per_node=per_node)
        return self.problem.knowledge.hardware_of(part)

    def zero_levels(self, section: Section) -> tuple[ZeroLevel, ...]:
        """Levels that a section may have; level 3 is for pipelines that have all in a domain."""
        if section.copies * self.num_pipelines == 1:
            return (0,)
        alone = self.num_pipelines == 1 or section.shard_ways > 0
        return self._levels[alone, self._eager[section.pool]]

    def _zero_levels(self, *, alone: bool, eager: bool) -> tuple[ZeroLevel, ...]:
        if keeps_apart(self.options.param_tiers[0], HOST if eager else ""):
            return tuple(z for z in self.options.zero if z == 3 and alone)
        return tuple(z for z in self.options.zero if z < 3 or alone) or (0,)

    def _choice(self, section: Section, samples: int) -> StageChoice:
        axes = tuple(axis for axis in section.axes if axis[1] > 1)
        return StageChoice(
            work=StageWork(
                layers=(0, 0),
                embeds=False,
                predicts=False,
                samples=samples,
                seq_len=self.workload.seq_len,
                axes=dividing(axes),
                recompute=slabs_of(section.recompute, 0),
                dtype=dtype_of(self.workload.precision),
                gathers_keys=self._gathers_keys[section.pool],
                in_chunks=True,
                eager=self._eager[section.pool],
                apart=not (self._eager[section.pool] or self.workload.training.compiled),
                wide_products=self.workload.training.wide_products,
            ),
            axes=axes,
            pipelines=self.num_pipelines,
            sites=self.sites,
            state=self._state,
            trained=self._trained,
            zero=section.zero,
            shard_ways=section.shard_ways,
            tier=self.options.tiers[0],
            param_tier=self.options.param_tiers[0],
            expert_tier=self.options.expert_tiers[0],
            expert_layers=self.expert_layers,
            by_element=self.workload.training.by_element,
        )

    def without_ways(self, section: Section, samples: int) -> StageChoice:
        """Of a section for whose parameters nobody waits: none takes less time."""
        near = self.choice(section._replace(zero=0), samples)
        return near._replace(param_tier="device", expert_tier="device")

    def _apart(self, sections: tuple[Section, ...]) -> dict[Apart, tuple[Section, ...]]:
        """All ranks together, or those of each node; beside other pipelines, of each pipeline."""
        found: dict[Apart, tuple[Section, ...]] = {"": sections}
        if not self.options.domains:
            return found
        if self.num_pipelines > 1:
            found["pipelines"] = tuple(s._replace(shard_ways=s.copies) for s in sections)
            return found
        near = [self._on_node(section) for section in sections]
        both = list(zip(sections, near, strict=True))
        if all(near) and any(1 < ways < section.copies for section, ways in both):
            found["nodes"] = tuple(
                section._replace(shard_ways=ways if ways < section.copies else 0)
                for section, ways in both
            )
        return found

    def _on_node(self, section: Section) -> int:
        """Ranks on one node that hold the same; 0 where nodes do not have equally many."""
        pool, together = self.pools[section.pool], section.together
        nodes = nodes_for(section.num_chips, together, pool.num_nodes, pool.chips_per_node)
        if pool.node or not nodes:
            return 0
        per_node, ranks = section.num_chips // nodes, num_ranks(section.axes)
        if per_node % ranks == 0:
            return section.copies
        whole = ranks % per_node == 0 and per_node * section.copies % ranks == 0
        return per_node * section.copies // ranks if whole else 0

    def _times(self, rank: Rank, held: Held) -> StageTimes:
        hardware = self.hardware(rank.pool, rank.per_node)
        times = partial(stage_times, self.shape, hardware=hardware)
        choice = held.of(rank.choice, self.dense)
        if not self.any_ways:
            return times(choice)
        return shortest([times(way) for way in _every_way(choice)])

    def _ragged(self, rank: Rank, last: int, held: Held) -> StageTimes:
        return replace(self.times(rank, held), last=self.times(self.taking(rank, last), held))

    def taking(self, rank: Rank, samples: int) -> Rank:
        """The rank with so many samples of a microbatch."""
        return self.rank(rank.pool, rank.per_node, rank.choice.taking(samples))

    def _bytes(self, rank: Rank, held: Held) -> Bytes:
        pool, choice = rank.pool, rank.choice
        parts = self.memory(pool, choice, held)
        on_host = 0.0
        if "host" in (choice.tier, choice.param_tier) and not choice.work.eager:
            near = "device" if choice.tier == "host" else choice.tier
            brings = "device" if choice.param_tier == "host" else choice.param_tier
            usual = self.memory(pool, choice._replace(tier=near, param_tier=brings), held)
            on_host = _of_params(usual) - _of_params(parts)
        if choice.expert_tier == "host" and choice.brings_experts:
            on_host += experts_apart(self.shape, held.of(choice, self.dense))
        whole, divided = parts.whole, parts.divided.total * parts.part
        shared = whole.working + whole.buffers + whole.runtime
        return Bytes(
            state=whole.total - shared + divided,
            kept=parts.each.total,
            working=whole.working,
            buffers=whole.buffers,
            border=parts.border.total,
            runtime=whole.runtime,
            on_host=on_host,
            away=stage_away(self.shape, held.of(choice, self.dense).work, "host"),
        )

    def memory(self, pool: int, choice: StageChoice, held: Held) -> StageMemory:
        """Of one stage on one rank, in parts."""
        overheads = self.problem.knowledge.overheads.get(self.pools[pool].chip.device)
        return stage_memory(self.shape, held.of(choice, self.dense), overheads)

    def _mesh_times(self, rank: Rank, ends: Ends, back: Kind) -> MeshTimes:
        """Of ``mesh_times``.

        Args:
            rank: With ZeRO that costs nothing.
            back: What hands on to the stage before.
        """
        more = self.more_layers(rank, 1)
        times = [more, *(self._least_end(rank, more, *each) for each in ends)]
        forward = [time.of("F") for time in times]
        returned = [time.of(back) for time in times]
        whole = [time.of("F") + time.of("B") for time in times]
        ahead, behind = (Slope(sum(every[1:]), every[0]) for every in (forward, returned))
        return MeshTimes(
            forward=ahead,
            back=behind,
            early=ahead.then(1, behind),
            whole=Slope(sum(whole[1:]), whole[0]),
            first_forward=forward[1],
            first_back=returned[1],
        )

    def _least_end(self, rank: Rank, more: StageTimes, first: bool, last: bool) -> StageTimes:
        """What a stage takes at least beside ``more`` for each of its layers."""
        none = self.times(rank, Held(0, first, last))
        if not (first and self.dense):
            return none
        some = self.times(rank, Held(self.dense, first, last))
        return shortest([none, some.without(more, self.dense)])

    def _border(
        self, ranks: Both, sizes: tuple[int, int], reach: Reach, far: Far | None
    ) -> BorderTimes:
        """Of ``border``.

        Args:
            sizes: Samples of a microbatch, and of the last.
            far: Where they are at unlike sites.
        """
        micro, last = sizes
        parts, small = ([each.carried(size) for each in ranks] for size in sizes)
        fabrics = [self.hardware(each.pool, each.per_node).fabric for each in ranks]
        part = self.message_part(*ranks, inside=reach == "node")
        workload = self.workload
        whole = border_bytes(workload.precision, micro, workload.seq_len, self.shape.d_model)
        return border_times(
            part * whole,
            parts,
            fabrics,
            reach=reach,
            far=far,
            last=max(small) * last / (max(parts) * micro),
        )

    def message_part(self, here: Rank, there: Rank, *, inside: bool) -> float:
        """Bytes that go over a border, beside those of the tensor, as ``with_casts`` will say what
        it is cast to."""
        cast, precision = self.options.border, self.workload.precision
        if not cast or not saves_bytes(cast, precision):
            return 1.0
        devices = {self.pools[each.pool].chip.device for each in (here, there)}
        apart = {None: True, "nodes": not inside, "families": len(devices) > 1}
        sizes = 1, 1, self.shape.d_model
        whole, sent = (border_bytes(precision, *sizes, cast=each) for each in ("", cast))
        return sent / whole if apart[self.options.border_between] else 1.0


class KnownCosts:
    """Of searches for one workload, on parts of one cluster: each asks what others found out of the
    same kinds of chips."""

    def __init__(self) -> None:
        self._known: list[tuple[object, Costs]] = []

    def of(
        self,
        problem: Problem,
        num_pipelines: int,
        sites: tuple[int, ...] = (),
        *,
        any_ways: bool = False,
    ) -> Costs:
        """The costs of a problem; ``any_ways``: as ``Costs`` has it."""
        kinds = [replace(pool, num_nodes=1, hosts=()) for pool in problem.cluster.pools]
        options = replace(problem.options, recompute=("off",), mixed_recompute=False, effort=0)
        key = kinds, problem.workload, problem.knowledge, options, num_pipelines, sites, any_ways
        for known, costs in self._known:
            if known == key:
                return costs.asked(problem)
        costs = Costs(problem, num_pipelines, sites)
        costs.any_ways = any_ways
        self._known.append((key, costs))
        return costs

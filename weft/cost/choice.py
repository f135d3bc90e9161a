"""What one stage of a pipeline may choose: the one description that all costs are asked about.

A stage of a plan, a mesh of a search and a line of a published table all become a ``StageChoice``.
Its memory is ``stage_memory``, its time ``stage_times``, what its layers send ``layer_sends``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, product
from math import ceil, prod
from typing import NamedTuple

from weft.cluster.cluster import HOST, Dtype
from weft.cluster.view import ClusterView, Site, count_by_level
from weft.cost.work import (
    ALL_BY_ADAMW,
    ALL_PARTS,
    BF16_STATE,
    DIVISIONS,
    EVEN,
    Axes,
    Parts,
    StageWork,
    StateBytes,
    Training,
    Widths,
    copies_in,
    dividing,
    share,
    stride,
    width_of,
)
from weft.memory.tiers import keeps_apart, of_gradients
from weft.plan.borders import Layers, Place, in_parts
from weft.plan.layout import At, places_at
from weft.plan.mesh import EXPERT_AXIS, WIDTH_AXIS, Mesh
from weft.plan.plan import PipelinePlan, Plan, Precision, StagePlan, ZeroLevel
from weft.platform.registry import PLATFORMS
from weft.precision.registry import PRECISIONS
from weft.precision.roles import Tier
from weft.recompute.asked import slabs_of


class Group(NamedTuple):
    """Ranks that talk: how many, and the distance between neighbours in the order of ranks."""

    size: int
    stride: int = 1
    sites: tuple[int, ...] = ()
    """At how many sites its ranks are, as many at each, in how many these are, and so on."""

    @property
    def leaves_its_site(self) -> bool:
        """It has ranks at several."""
        return any(many > 1 for many in self.sites)


class StageChoice(NamedTuple):
    """Layers on a mesh of like chips, and how its ranks compute and keep them."""

    work: StageWork
    """Of one rank in a pass of a full microbatch, on the rank with the most samples."""
    axes: Axes = ()
    """Sizes of the mesh, those above 1, outermost first."""
    passes: int = 1
    pieces: int = 1
    """Of sums inside layers, where links work beside the chip."""
    pipelines: int = 1
    """Side by side, which hold the same parameters, this one counted."""
    sites: tuple[int, ...] = ()
    """Far apart, at which these are, as ``Group`` has them."""
    state: StateBytes = BF16_STATE
    trained: Parts = ALL_PARTS
    zero: ZeroLevel = 0
    shard_ways: int = 0
    """Ranks, next to each other, that sum before they meet others, and share what ``zero`` names:
    those of one domain; 0 is all that hold the same."""
    part: float | None = None
    """Of what they share, the part that this rank keeps; None: as much as each of the others."""
    crossing: float = 1.0
    """Part of the bytes of gradients that is sent between those who sum for themselves first."""
    reduced: float = 1.0
    """Likewise among those of one domain."""
    gathers: float = 1.0
    """Part of the bytes of parameters that is gathered."""
    tier: Tier = "device"
    """Where what only updates need is kept."""
    param_tier: Tier = "device"
    """Where parameters wait until something computes with them."""
    expert_tier: Tier = "device"
    """Where experts are kept until they compute, with their gradients and state."""
    expert_layers: int = 2
    """Layers whose experts are on the device at a time, where they are kept elsewhere."""
    by_element: bool = True
    """Updates may take parts of tensors in turn."""
    overlap: float = 1.0
    """Microbatches whose computing may hide gradients and parameters on their way: the last one's
    backward, and the first one's forward."""

    @property
    def keeps_apart(self) -> bool:
        """What only updates need is not in the device's memory."""
        return keeps_apart(self.tier, HOST if self.work.eager else "")

    @property
    def brings_params(self) -> bool:
        """Parameters come to the device's memory when something computes with them."""
        return keeps_apart(self.param_tier, HOST if self.work.eager else "")

    @property
    def grad_tier(self) -> Tier:
        """Where gradients go as backward makes them."""
        return of_gradients(self.param_tier, self.tier, HOST if self.work.eager else "")

    @property
    def keeps_grads_apart(self) -> bool:
        """That is not the device's memory."""
        return self.grad_tier != "device"

    def taking(self, samples: int) -> StageChoice:
        """With so many samples of a microbatch on its rank."""
        return self._replace(work=self.work._replace(samples=ceil(samples / self.passes)))

    @property
    def brings_experts(self) -> bool:
        """Experts come to the device's memory when their layer computes."""
        return keeps_apart(self.expert_tier, HOST if self.work.eager else "")

    @property
    def expert_holders(self) -> int:
        """Ranks of the mesh that hold the same experts."""
        return max(self.copies // share(self.work.axes, "experts"), 1)

    def holding(self, layers: Layers, *, embeds: bool, predicts: float) -> StageChoice:
        """The same of a stage that holds other layers."""
        work = self.work._replace(layers=layers, embeds=embeds, predicts=predicts)
        return self._replace(work=work)

    @property
    def copies(self) -> int:
        """Ranks of the mesh that hold the same parameters."""
        return copies_in(self.axes)

    @property
    def num_holders(self) -> int:
        """Ranks that hold the same parameters; level 3 keeps other pipelines out of it, if they do
        not have all in domains of their own."""
        return self.copies * (self.pipelines if self.zero < 3 or self.shard_ways else 1)

    @property
    def ways(self) -> int:
        """Of these, how many share what the level of ZeRO names."""
        return min(self.shard_ways or self.num_holders, self.num_holders) if self.zero else 1

    @property
    def kept(self) -> float:
        """The part of what the level of ZeRO names that this rank keeps and updates."""
        return 1 / self.ways if self.part is None else self.part

    def holders(self, chips_per_node: int) -> Group:
        """Ranks that hold the same parameters. Those of other pipelines are on other nodes."""
        near = self._stride
        if self.num_holders == self.copies:
            return Group(self.num_holders, near, self.sites)
        return Group(self.num_holders, max(near, chips_per_node), self.sites)

    @property
    def _stride(self) -> int:
        """Of ranks of the mesh that hold the same."""
        names = [name for name, _ in self.axes if DIVISIONS[name].copies]
        return stride(self.axes, names[-1]) if names else self.num_ranks

    def parts(self, holders: Group, *, experts: int = 1) -> tuple[Group, Group]:
        """Those that sum first, and one of each such group, who sum what came of it.

        Without domains and ZeRO all sum at once, which is the second. ``experts``: ways in which
        ranks that hold the same layers hold other experts.
        """
        size = max(holders.size // experts, 1)
        ways = min(self.shard_ways or size * (self.zero > 0), size) or 1
        beside = self.shard_ways > self.copies or not self.shard_ways
        near = (holders.stride if beside else self._stride) * experts
        apart, sites = size // ways, holders.sites
        # A domain is at as few sites as can be, and in as few of those.
        inside = tuple(min(ways, ceil(many * ways / size)) for many in sites)
        outside = tuple(min(many, apart) for many in sites)
        return (
            Group(ways, near, inside),
            Group(apart, max(near * ways, holders.stride * experts), outside),
        )

    @property
    def num_ranks(self) -> int:
        """Of the mesh."""
        return prod(size for name, size in self.axes if not DIVISIONS[name].borrowed)

    @property
    def reduces_each_backward(self) -> bool:
        """Level 2 need not wait for other pipelines to send gradients where they are summed, if
        there are none, or they are in other domains."""
        alone = self.pipelines == 1 or 0 < self.shard_ways <= self.copies
        return self.zero == 2 and alone


def by_layer(choice: StageChoice, cuts: Collection[Place] = ()) -> list[StageChoice]:
    """A stage in parts: the embedding where it has one, what it has of every layer, the head.

    ``cuts``: of other stages inside layers.
    """
    layers = [
        choice._replace(work=part).holding(held, embeds=False, predicts=False)
        for part in choice.work.in_turn()
        for held in in_parts(part.layers, cuts)
    ]
    first = [choice.holding((0, 0), embeds=True, predicts=False)] * choice.work.embeds
    part = choice.work.predicts
    last = [choice.holding((0, 0), embeds=False, predicts=part)] * bool(part)
    return [*first, *layers, *last]


def dtype_of(precision: Precision) -> Dtype:
    """In which products are computed, of those that chips' rates are known for."""
    if PRECISIONS[precision].has_fast_products:
        return "fp8"
    if width_of(precision) != 2:
        return "fp32"
    return "fp16" if PRECISIONS[precision].compute.stored_as == "float16" else "bf16"


def gathers_keys(device: str) -> bool:
    """Attention among ranks that divide samples' tokens gathers keys there: no kernel gives
    logarithms of sums, by which they could go round as they do on a processor."""
    return device not in {HOST, *(p.name for p in PLATFORMS.imported() if p.has_varlen)}


def most_samples(stage: StagePlan, size: int, rank: int | None = None) -> int:
    """Of so many samples those of the rank that has most, or of one rank."""
    if not stage.sample_shares:
        return ceil(size / stage.mesh.sample_ways)
    split = stage.mesh.split_samples(size, stage.sample_shares)
    return max(map(len, split.values())) if rank is None else len(split[rank])


def choice_of(
    pipeline: PipelinePlan,
    number: int,
    seq_len: int,
    num_pipelines: int = 1,
    training: Training = ALL_BY_ADAMW,
    shard_ways: int = 0,
    *,
    rank: int | None = None,
    part: float | None = None,
) -> StageChoice:
    """Of a planned stage.

    Args:
        num_pipelines: Of the whole plan.
        shard_ways: As ``ways_of_domains`` has them for the whole plan.
        rank: Whose samples count; None: the rank's that has most.
        part: As ``state_parts`` has it for that rank.
    """
    stage = pipeline.stages[number]
    axes = tuple((name, size) for name, size in stage.mesh.axes if size > 1)
    micro = pipeline.size_of(0)
    samples = most_samples(stage, micro, rank)
    experts = _experts_of(stage, rank)
    mean = micro / stage.mesh.sample_ways if stage.sample_shares else samples
    is_compiled = stage.compile if training.by_stage else training.compiled
    return StageChoice(
        work=StageWork(
            layers=stage.layers,
            embeds=number == 0,
            predicts=pipeline.part_of_head(number),
            samples=ceil(samples / stage.passes),
            seq_len=seq_len,
            axes=dividing(axes),
            recompute=slabs_of(stage.recompute, len(stage.blocks)),
            dtype=dtype_of(stage.precision),
            gathers_keys=stage.scores == "blocks" and gathers_keys(stage.device),
            head_ways=stage.head_ways,
            expert_pieces=stage.expert_pieces,
            experts_at_once=stage.expert_ways == 1,
            widths=_widths_of(stage, rank),
            expert_part=experts.held,
            expert_kept=experts.kept,
            expert_visits=experts.visited * mean / samples if samples else 1.0,
            expert_cast=stage.expert_cast,
            expert_cast_near=not stage.expert_cast_between,
            in_rows=stage.scores == "rows",
            in_chunks=True,
            eager=stage.device == HOST,
            apart=stage.device != HOST and not is_compiled,
            wide_products=training.wide_products,
        ),
        axes=axes,
        passes=stage.passes,
        pieces=1 if stage.device == HOST else stage.pieces,
        pipelines=num_pipelines,
        state=training.state(stage.precision),
        trained=training.parts(stage.layers),
        zero=stage.zero,
        shard_ways=shard_ways,
        part=part,
        tier=stage.state_tier,
        param_tier=stage.param_tier,
        expert_tier=stage.expert_tier,
        expert_layers=stage.expert_layers,
        by_element=training.by_element,
    )


class _Experts(NamedTuple):
    """Of a rank, or of the one that has most, beside as many for each rank."""

    held: float = 1.0
    kept: float = 1.0
    """Where each of several copies of one counts as a part."""
    visited: float = 1.0
    """By tokens, where every expert has as many and each of its copies as many of them."""


def _experts_of(stage: StagePlan, rank: int | None) -> _Experts:
    mesh = stage.mesh
    layers = [places for places in stage.expert_places if places]
    mine = None if rank is None else mesh.coordinate(rank)[EXPERT_AXIS]
    if layers:
        return _at_places(layers, mesh.size(EXPERT_AXIS), mine)
    shares = mesh.shares(EXPERT_AXIS)
    if not shares:
        return _Experts()
    own = (max(shares) if mine is None else shares[mine]) * len(shares) / sum(shares)
    return _Experts(own, own, own)


def _widths_of(stage: StagePlan, rank: int | None) -> Widths:
    """Of a rank, or of the one that has most."""
    shares = stage.mesh.shares(WIDTH_AXIS)
    if not shares:
        return EVEN
    most = shares.index(max(shares))
    return Widths(shares, most if rank is None else stage.mesh.coordinate(rank)[WIDTH_AXIS])


def _at_places(layers: Sequence[Sequence[At]], ways: int, mine: int | None) -> _Experts:
    """Layers wait for one another, so what is visited is of the most in each."""
    wanted = range(ways) if mine is None else (mine,)
    held, kept = dict.fromkeys(wanted, 0.0), dict.fromkeys(wanted, 0.0)
    visited = 0.0
    for layer in layers:
        own = dict.fromkeys(wanted, 0.0)
        for places in map(places_at, layer):
            for place in own.keys() & {*places}:
                held[place] += 1
                own[place] += 1 / len(places)
        visited += max(own.values())
        kept = {place: kept[place] + own[place] for place in kept}
    even = sum(map(len, layers)) / ways
    return _Experts(max(held.values()) / even, max(kept.values()) / even, visited / even)


def state_parts(plan: Plan) -> dict[tuple[int, int], dict[int, float]]:
    """By pipeline and stage, where the plan says unlike shares: the part of what its level of ZeRO
    names that each rank keeps, among those of its domain that hold the same."""
    found: dict[tuple[int, int], dict[int, float]] = {}
    if not any(stage.state_shares for _, _, stage in plan.stages()):
        return found
    for p, s, stage in plan.stages():
        units = plan.units(p, s)
        same = [other for _, _, other in plan.stages_with(units & {stage.layers[0]} or units)]
        if stage.zero and any(other.state_shares for other in same):
            found[p, s] = {rank: _part_of(rank, stage, same, plan) for rank in stage.mesh.ranks}
    return found


def _part_of(rank: int, stage: StagePlan, same: Sequence[StagePlan], plan: Plan) -> float:
    """Of one rank of a stage; ``same``: all stages that hold what it holds."""
    near = next((domain for domain in plan.domains if rank in domain), range(plan.world_size))
    total = own = 0.0
    for mesh, shares in {each.mesh: each.state_shares for each in reversed(same)}.items():
        weights = dict(zip(mesh.ranks, shares or (1,) * len(mesh.ranks), strict=True))
        if mesh == stage.mesh:
            own = weights[rank]
            total += sum(weights[mate] for mate in alike(mesh, rank) if mate in near)
        else:  # who of another mesh has the same may lie between others: their mean
            beside = sum(weights[mate] for mate in mesh.ranks if mate in near)
            total += beside * mesh.sample_ways / len(mesh.ranks)
    return own / total if total else 0.0


def ways_of_domains(plan: Plan) -> dict[tuple[int, int], int]:
    """By pipeline and stage: ranks of one domain that hold what it holds, in the smallest domain;
    0 where no other domain holds it too."""
    found = {(p, s): 0 for p, s, _ in plan.stages()}
    domain_of = {rank: number for number, ranks in enumerate(plan.domains) for rank in ranks}
    copies = {stage.mesh: (*alike(stage.mesh),) for _, _, stage in plan.stages() if plan.domains}
    for p, s, stage in plan.stages() if plan.domains else ():
        same = {rank for mesh in _holding_the_same(plan, p, s) for rank in copies[mesh]}
        sizes = Counter(domain_of[rank] for rank in same)
        if len(sizes) > 1:
            found[p, s] = min(sizes[domain_of[rank]] for rank in copies[stage.mesh])
    return found


def num_sites(plan: Plan, cluster: ClusterView) -> dict[tuple[int, int], tuple[int, ...]]:
    """By pipeline and stage, at how many sites of a cluster there are holders of what it holds, as
    ``Group`` has them."""
    if not cluster.sites:
        return {}
    return {
        (p, s): count_by_level(
            chain(*(_sites_of_copies(mesh, cluster) for mesh in _holding_the_same(plan, p, s)))
        )
        for p, s, _ in plan.stages()
    }


def _sites_of_copies(mesh: Mesh, cluster: ClusterView) -> Iterable[Site | None]:
    """Where those of a mesh are that hold the same."""
    sites = cluster.sites_of(mesh.ranks)
    return sites if len(sites) == 1 else map(cluster.site_of, alike(mesh))


def sites_along_axes(mesh: Mesh, cluster: ClusterView) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Of a mesh, as ``StageWork`` has them: of each axis the ranks that are farthest apart."""
    if not cluster.sites or len(cluster.sites_of(mesh.ranks)) == 1:
        return ()
    every = (
        (axis, max(count_by_level(map(cluster.site_of, ranks)) for ranks in mesh.groups(axis)))
        for axis, _ in mesh.axes
    )
    return tuple((axis, many) for axis, many in every if any(n > 1 for n in many))


def _holding_the_same(plan: Plan, p: int, s: int) -> list[Mesh]:
    """The meshes of all stages that hold the first unit that a stage holds."""
    units, stage = plan.units(p, s), plan.pipelines[p].stages[s]
    some = units & {stage.layers[0]} or {*sorted(units, key=str)[:1]}
    return [other.mesh for _, _, other in plan.stages_with(some)]


def alike(mesh: Mesh, rank: int | None = None, *, experts: bool = False) -> Iterator[int]:
    """Ranks that hold the same parameters as ``rank``, or the same experts; or the first such
    group: it reaches as far as the others."""
    here = mesh.coordinate(mesh.ranks[0] if rank is None else rank)
    axes = [
        (name, range(size))
        for name, size in mesh.axes
        if DIVISIONS[name].copies and not (experts and DIVISIONS[name].param)
    ]
    for at in product(*(positions for _, positions in axes)):
        yield mesh.rank_at(**{**here, **{name: n for (name, _), n in zip(axes, at, strict=True)}})

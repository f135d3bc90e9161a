"""The plan: what will run, with nothing left to guess. Prints, compares and saves as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal

from weft.config.axes import UNLIKE
from weft.plan.borders import Layers, Place, blocks, crossed, is_place, place
from weft.plan.layout import At
from weft.plan.mesh import Mesh
from weft.plan.model import UnitName
from weft.precision.roles import Tier

Precision = str
"""Name of an entry of ``weft.precision``."""
Recompute = str
HISTORY = 16
"""Steps that delayed scales are made of where nobody says how many."""
"""What backward computes again, as ``weft.recompute.asked`` reads it."""
ZeroLevel = Literal[0, 1, 2, 3]
Scores = Literal["blocks", "rows"]
ScheduleName = str
"""Name of a file of ``weft.schedules``."""
DEFAULT_SCHEDULE: ScheduleName = "1f1b"


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """Consecutive layers on a mesh of ranks of one chip kind, and how they compute."""

    mesh: Mesh
    layers: Layers
    """Half-open range of decoder layers; the first stage adds the embedding, the last the head,
    unless others have parts of that.
    2.5 is inside layer 2: the stage that ends there has its first part, the next one the rest."""
    device: str = "cpu"
    """Platform name: the family of chip that every rank of this stage runs on."""
    precision: Precision = "fp32"
    recompute: Recompute = "off"
    compile: bool = False
    zero: ZeroLevel = 0
    """What ranks that hold the same parameters share among them instead of each keeping all of it:
    1 the optimizer's state, 2 gradients too, 3 the parameters too (arXiv 1910.02054). Parameters
    that stages of unlike levels hold are kept at the lowest; level 3 only inside one stage."""
    passes: int = 1
    """Parts that each rank cuts its samples of a microbatch into, computed one after another."""
    pieces: int = 1
    """Pieces of what ranks along an axis gather and sum inside layers: one is on its way while
    products of another are made."""
    head_ways: int = 1
    """How many neighbours that divide samples' tokens divide heads instead in attention (DeepSpeed
    Ulysses, arXiv 2309.14509): all, or some for two dimensions; 1: keys go to all."""
    scores: Scores = "blocks"
    """What such ranks make of attention's scores as keys come: blocks that are forgotten, or whole
    rows of them, which values then follow (ring self-attention, arXiv 2105.13120)."""
    expert_ways: int = 0
    """How many neighbours that divide experts exchange tokens among themselves first, so that few
    messages go on from there (arXiv 2205.10034); 0: those of one machine, 1: all at once."""
    expert_pieces: int = 1
    """Pieces of each rank's tokens on their way to experts elsewhere: experts compute one while
    others come and go."""
    expert_cast: str = ""
    """Tokens on their way to experts elsewhere and back are cast to this, an entry of
    ``weft.precision.casts``, and all others of the layer with them; empty: they travel as they are.
    Numbers then depend on which stages ask for it, and on nothing else of the plan."""
    expert_cast_between: str = ""
    """``nodes``: only in exchanges among ranks of several machines; empty: in all."""
    sample_shares: tuple[int, ...] = ()
    """Weight of the samples of a microbatch that are computed at each place along the axes that
    divide samples; 0 computes none. Empty: alike."""
    state_shares: tuple[int, ...] = ()
    """By rank of the mesh: weight of its part of what ``zero`` names, among all ranks that hold the
    same; 0 keeps none. Empty: 1 each."""
    border: str = ""
    """What goes over the border to the next stage, and comes back, is cast to this, an entry of
    ``weft.precision.casts``; empty: it travels as it is. Numbers then depend on where that border
    is, and on nothing else of the plan."""
    reduction: str = ""
    """What ranks of one domain send each other to sum gradients is cast to this, where all that
    hold some say so, as ``border`` is; empty: it travels as it is. Numbers then depend on who sums
    with whom."""
    gather: str = ""
    """``fp8``: weights that products in eight bits alone read are rounded before ranks gather them,
    where all that hold some do so, and not after; empty: they are gathered as they are. No number
    depends on it."""
    state_tier: Tier = "device"
    """Where ranks keep what only updates need: the optimizer's state, and master copies."""
    param_tier: Tier = "device"
    """Where ranks keep the parameters that they compute with, each unit's until it computes."""
    expert_tier: Tier = "device"
    """Where ranks keep experts, all that there is of them: each layer's parameters until it
    computes, gradients, and what updates need. ``device``: as all other parameters."""
    expert_layers: int = 2
    """Layers whose experts may be on the device at a time, where they are kept elsewhere: the one
    that computes, the one that comes next, and those that computed last."""
    expert_places: tuple[tuple[At, ...], ...] = ()
    """Of each of its layers, of each expert, at which place it is along the axis that divides
    experts, or at which places there are copies of it; a layer without experts has none. Empty:
    consecutive ones are together."""
    head_rows: tuple[int, int] | None = None
    """Half-open range of the vocabulary whose rows of the head this stage has, and no layers. Such
    stages come last, side by side on meshes of the pipeline, and each also has the final norm.
    None everywhere: the last stage has the whole head."""

    @property
    def is_uneven(self) -> bool:
        """Its ranks compute unlike parts."""
        return bool(self.sample_shares or self.mesh.unlike)

    @property
    def is_unlike(self) -> bool:
        """Its ranks compute or hold unlike parts."""
        return self.is_uneven or bool(self.expert_places)

    @property
    def blocks(self) -> range:
        """Numbers of the layers that it has, at least in part."""
        return blocks(self.layers)

    @property
    def places(self) -> dict[int, tuple[At, ...]]:
        """By layer, ``expert_places``; empty where it says nothing."""
        said = zip(self.blocks, self.expert_places, strict=True) if self.expert_places else ()
        return {layer: places for layer, places in said if places}

    @property
    def cut(self) -> tuple[bool, bool]:
        """Of the first of these layers it lacks the first part; of the last the second."""
        first, end = self.layers
        return first % 1 > 0, end % 1 > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """Stages in order, and the part of every global batch that flows through them."""

    stages: tuple[StagePlan, ...]
    samples: int
    """Samples of each global batch that this pipeline takes."""
    microbatch: int
    """Samples in one microbatch, over all data-parallel ranks of a stage; the last may be less."""
    schedule: ScheduleName = DEFAULT_SCHEDULE
    """In which order forwards and backwards of the microbatches are done."""
    in_flight: tuple[int, ...] = ()
    """By position, microbatches at most whose forward is begun and whose backward is not done;
    empty: as many as keep every position at work where borders take no time."""
    lists: tuple[str, ...] = ()
    """By position, its actions in order, as ``weft.schedules.notation`` writes them, made for these
    stages and borders; empty: those of the schedule. Its name still says where stages are, and
    whether backward comes in halves."""

    @property
    def order(self) -> str:
        """The schedule in words; nothing for one stage, which has no other."""
        counts = ", ".join(map(str, self.in_flight))
        words = self.schedule + (f" with {counts} in flight" if counts else "")
        words += " with a list made for it" if self.lists else ""
        return words if len(self.stages) > 1 else ""

    @property
    def num_microbatches(self) -> int:
        return -(-self.samples // self.microbatch)

    def size_of(self, microbatch: int) -> int:
        """Samples of a microbatch."""
        return min(self.microbatch, self.samples - microbatch * self.microbatch)

    def positions(self) -> list[tuple[int, ...]]:
        """Stage numbers by the mesh that holds them, in the order in which meshes first come.

        Several stages on one mesh make an interleaved or a V-shaped pipeline, or one of them is a
        part of the head.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for number, stage in enumerate(self.stages):
            found.setdefault(stage.mesh.ranks, []).append(number)
        return [tuple(numbers) for numbers in found.values()]

    @property
    def num_chained(self) -> int:
        """Stages that follow one another: all but parts of the head."""
        return sum(stage.head_rows is None for stage in self.stages)

    @property
    def heads(self) -> range:
        """Numbers of the stages that have a part of the head each; none where the last has all."""
        return range(self.num_chained, len(self.stages))

    @property
    def borders(self) -> list[tuple[int, int]]:
        """``crossed``."""
        return crossed(self.num_chained, len(self.heads))

    def computes(self, stage: int, unit: UnitName) -> bool:
        """A stage has a unit of the model, at least in part, or what begins at a place inside a
        layer."""
        if unit == "embed":
            return stage == 0
        if unit == "head":
            return stage >= min(self.num_chained, len(self.stages) - 1)
        first, end = self.stages[stage].layers
        return first <= unit < end

    def part_of_head(self, stage: int) -> float:
        """Which part of the head's rows a stage has."""
        if not self.heads or stage not in self.heads:
            return float(self.computes(stage, "head"))
        ends = [rows for each in self.stages if (rows := each.head_rows)]
        low, high = ends[stage - self.num_chained]
        return (high - low) / ends[-1][1]

    def split(self, stage: int, microbatch: int) -> dict[int, range]:
        """Which samples of a microbatch each rank of a stage computes.

        Positions inside the microbatch; consecutive parts along the axes that divide samples.
        """
        found = self.stages[stage]
        return found.mesh.split_samples(self.size_of(microbatch), found.sample_shares)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One job: pipelines side by side over disjoint ranks ``0 .. world_size - 1``."""

    num_layers: int
    pipelines: tuple[PipelinePlan, ...]
    domains: tuple[tuple[int, ...], ...] = ()
    """Sets of ranks that fast links join, every rank in one of them; empty: all are one. What ranks
    of several domains hold in common is summed inside each, then between them part by part in the
    order of the domains; what ZeRO divides is divided inside each, and every domain has all."""
    sums: str = ""
    """What domains send each other of gradients is cast to this, an entry of
    ``weft.precision.casts``; empty: it travels as it is. Numbers then depend on the domains."""
    history: int = HISTORY
    """Steps before that count for scales of products that are delayed."""
    margin: int = 0
    """Powers of two that such scales leave for numbers to grow; what is larger is cut off."""
    sites: tuple[tuple[int, ...], ...] = ()
    """Sets of ranks, each of whole pipelines, that train for themselves and meet every so many
    steps; empty: all are one. Numbers depend on them, as on what is cast."""

    @property
    def global_batch(self) -> int:
        """Samples in one step of the whole job."""
        return sum(pipeline.samples for pipeline in self.pipelines)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(sorted({rank for _, _, stage in self.stages() for rank in stage.mesh.ranks}))

    @property
    def casts(self) -> dict[str, list[tuple[int, int]]]:
        """By what borders are cast to: pipeline and stage before each."""
        found: dict[str, list[tuple[int, int]]] = {}
        for p, s, stage in self.stages():
            if stage.border:
                found.setdefault(stage.border, []).append((p, s))
        return found

    @property
    def expert_casts(self) -> dict[str, list[tuple[int, int]]]:
        """By what tokens to experts are cast to: pipeline and stage."""
        found: dict[str, list[tuple[int, int]]] = {}
        for p, s, stage in self.stages():
            if stage.expert_cast:
                found.setdefault(stage.expert_cast, []).append((p, s))
        return found

    @property
    def has_unlike_shares(self) -> bool:
        """Ranks of a mesh compute, or keep, unlike parts."""
        return any(stage.is_uneven or stage.state_shares for _, _, stage in self.stages())

    @property
    def has_unlike_state(self) -> bool:
        """Ranks of a mesh keep unlike parts."""
        return any(stage.state_shares for _, _, stage in self.stages())

    @property
    def devices(self) -> list[str]:
        """What each rank computes on, in their order."""
        found = {rank: stage.device for _, _, stage in self.stages() for rank in stage.mesh.ranks}
        return [found[rank] for rank in sorted(found)]

    def stages(self) -> Iterator[tuple[int, int, StagePlan]]:
        """(pipeline number, stage number, stage) in order."""
        for p, pipeline in enumerate(self.pipelines):
            for s, stage in enumerate(pipeline.stages):
                yield p, s, stage

    @property
    def cuts(self) -> set[Place]:
        """Places inside layers at which a stage begins."""
        return {stage.layers[0] for _, _, stage in self.stages() if stage.layers[0] % 1}

    @property
    def places(self) -> list[Place]:
        """Where units of layers begin: at every layer, and where a stage begins inside one."""
        return sorted([*range(self.num_layers), *self.cuts])

    def units(self, pipeline: int, stage: int) -> set[UnitName]:
        """Of the model, those that a stage computes with: its layers, and the ends that it has. A
        layer that some pipeline cuts is two, each called by the place where it begins."""
        held, here = self.pipelines[pipeline], self.pipelines[pipeline].stages[stage]
        every: list[UnitName] = ["embed", *here.blocks, *self.cuts, "head"]
        return {unit for unit in every if held.computes(stage, unit)}

    def stages_with(self, units: Collection[UnitName]) -> list[tuple[int, int, StagePlan]]:
        """Of ``stages``, those that compute with one of these units of the model."""
        return [
            (p, s, stage)
            for p, s, stage in self.stages()
            if any(self.pipelines[p].computes(s, unit) for unit in units)
        ]

    def by_domain(self, ranks: Collection[int]) -> tuple[tuple[int, ...], ...]:
        """The ranks, ascending, apart by domain, in the order of domains; none is empty."""
        if not self.domains:
            return (tuple(sorted(ranks)),)
        wanted = {*ranks}
        parts = (tuple(sorted(wanted.intersection(domain))) for domain in self.domains)
        return tuple(filter(None, parts))

    def site(self, rank: int) -> Plan:
        """What the site of a rank does in a step: its pipelines, on ranks that keep their numbers.
        All of the plan where there are no sites."""
        if not self.sites:
            return self
        ranks = next({*site} for site in self.sites if rank in site)
        kept = (p for p in self.pipelines if ranks & {*p.stages[0].mesh.ranks})
        return replace(self, pipelines=tuple(kept), sites=())

    def by_site(self) -> list[Plan]:
        """What each site does in a step; of a plan without sites it alone."""
        return [self.site(ranks[0]) for ranks in self.sites] or [self]

    def on_ranks(self, new: Sequence[int]) -> Plan:
        """The same with rank ``r`` called ``new[r]``."""

        def moved(stage: StagePlan) -> StagePlan:
            ranks = tuple(new[rank] for rank in stage.mesh.ranks)
            return replace(stage, mesh=replace(stage.mesh, ranks=ranks))

        sets = (
            tuple(tuple(new[rank] for rank in each) for each in sets)
            for sets in (self.domains, self.sites)
        )
        domains, sites = sets
        return replace(self.each(moved), domains=domains, sites=sites)

    def each(self, change: Callable[[StagePlan], StagePlan]) -> Plan:
        """The same with every stage changed."""
        pipelines = (
            replace(pipeline, stages=tuple(map(change, pipeline.stages)))
            for pipeline in self.pipelines
        )
        return replace(self, pipelines=tuple(pipelines))

    def rank_plan(self, rank: int) -> RankPlan:
        """Where a rank sits. Every rank of a valid plan has exactly one rank_plan."""
        for p, pipeline in enumerate(self.pipelines):
            for position, stages in enumerate(pipeline.positions()):
                if rank in pipeline.stages[stages[0]].mesh.ranks:
                    return RankPlan(
                        rank=rank, pipeline=p, position=position, stages=stages, plan=self
                    )
        raise AssertionError(f"rank {rank} is not in a plan of {self.world_size} ranks")

    def to_json(self) -> str:
        silent = {"domains": (), "sums": "", "sites": (), "history": HISTORY, "margin": 0}
        data = asdict(self)
        for key, value in silent.items():
            if data[key] == value:  # as plans are that never heard of them
                del data[key]
        for pipeline in data["pipelines"]:
            for key in ("in_flight", "lists"):
                if not pipeline[key]:
                    del pipeline[key]
        for stage in chain.from_iterable(each["stages"] for each in data["pipelines"]):
            _leave_out_usual(stage)
        return json.dumps(data, indent=2)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what ``to_json`` wrote. The caller checks the result with ``validate``."""
        data = json.loads(text)
        pipelines = []
        for entry in data.pop("pipelines"):
            stages = tuple(_stage(each) for each in entry.pop("stages"))
            counts, lists = (tuple(entry.pop(key, ())) for key in ("in_flight", "lists"))
            pipelines.append(PipelinePlan(stages=stages, in_flight=counts, lists=lists, **entry))
        domains, sites = (tuple(map(tuple, data.pop(key, ()))) for key in ("domains", "sites"))
        return Plan(pipelines=tuple(pipelines), domains=domains, sites=sites, **data)


def _leave_out_usual(stage: dict[str, Any]) -> None:
    mesh = stage["mesh"]
    shares = dict(mesh.pop("unlike"))
    mesh |= {entry.shares_key: shares[entry.name] for entry in UNLIKE if entry.name in shares}
    stage["layers"] = [*map(place, stage["layers"])]
    for key, value in _USUAL.items():
        if stage[key] == value:
            del stage[key]
    for key in _USUALLY_EMPTY:
        if not stage[key]:
            del stage[key]


_USUAL: Mapping[str, object] = MappingProxyType(
    {
        "pieces": 1,
        "head_ways": 1,
        "expert_ways": 0,
        "expert_pieces": 1,
        "scores": "blocks",
        "state_tier": "device",
        "param_tier": "device",
        "expert_tier": "device",
        "expert_layers": 2,
    }
)
"""Of a stage."""
_USUALLY_EMPTY = (
    "expert_cast",
    "expert_cast_between",
    "sample_shares",
    "state_shares",
    "border",
    "reduction",
    "gather",
    "head_rows",
    "expert_places",
)
"""Of a stage."""


def _stage(data: dict[str, Any]) -> StagePlan:
    mesh = data.pop("mesh")
    axes = tuple((str(name), int(size)) for name, size in mesh.pop("axes"))
    first, end = (place(each) if is_place(each) else each for each in data["layers"])
    unlike = {entry.name: mesh.pop(entry.shares_key, ()) for entry in UNLIKE}
    grid = Mesh(ranks=tuple(mesh.pop("ranks")), axes=axes, **mesh)  # which refuses what is left
    shares = {key: tuple(data.get(key, ())) for key in ("sample_shares", "state_shares")}
    if data.get("expert_places"):
        shares["expert_places"] = tuple(
            tuple(tuple(at) if isinstance(at, list) else at for at in layer)
            for layer in data["expert_places"]
        )
    if data.get("head_rows"):
        shares["head_rows"] = tuple(data["head_rows"])
    own = {"mesh": grid.with_shares(**unlike), "layers": (first, end)}
    return StagePlan(**{**data, **shares, **own})


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """What a plan says of one rank, and the arithmetic that follows from it."""

    rank: int
    pipeline: int
    position: int
    """Place in the pipeline, counted in meshes."""
    stages: tuple[int, ...]
    """The stages this rank computes, in model order. They share a mesh, device and precision."""
    plan: Plan

    @property
    def pipeline_plan(self) -> PipelinePlan:
        return self.plan.pipelines[self.pipeline]

    @property
    def stage_plan(self) -> StagePlan:
        """The first of this rank's stages: its mesh, device and precision are those of all."""
        return self.pipeline_plan.stages[self.stages[0]]

    def group(self, axis: str) -> tuple[int, ...]:
        """The ranks along an axis of this rank's mesh, this one among them."""
        return next(g for g in self.stage_plan.mesh.groups(axis) if self.rank in g)

    @property
    def counts_samples(self) -> bool:
        """Of the ranks that compute the same samples, this one's sums are counted."""
        return self.stage_plan.mesh.is_first_with_samples(self.rank)

    def microbatches(self) -> list[range]:
        """Positions inside the global batch that this rank computes, one range a microbatch.

        Depends on the plan alone: pipelines take consecutive shares of the batch, microbatches
        consecutive parts of a share, data-parallel ranks consecutive parts of a microbatch.
        A range may be empty.
        """
        pipeline = self.pipeline_plan
        start = sum(p.samples for p in self.plan.pipelines[: self.pipeline])
        result = []
        for number in range(pipeline.num_microbatches):
            mine = pipeline.split(self.stages[0], number)[self.rank]
            low = start + number * pipeline.microbatch
            result.append(range(low + mine.start, low + mine.stop))
        return result

"""Which rank holds which box of which parameter, and who owns it: arithmetic from the plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import add

from torch import nn

from weft.axes.held import tiling
from weft.models.registry import FAMILIES, dims_of_param
from weft.plan.box import Box
from weft.plan.layout import Dim, of_rows, placed
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec, ParamSpec
from weft.plan.plan import Plan, StagePlan, ZeroLevel
from weft.plan.tiling import Stored, Tiling, refine
from weft.precision.registry import PRECISIONS
from weft.precision.roles import Tier


@dataclass(frozen=True, slots=True)
class LocalParam:
    """A parameter that this rank holds: ``param`` stores some boxes of the logical tensor."""

    spec: ParamSpec
    stored: Stored
    param: nn.Parameter
    uses: int = 1
    """Stages of this rank that compute with it."""


@dataclass(frozen=True, slots=True)
class Held:
    """A box of a parameter that the same ranks hold throughout, and how they keep its state."""

    spec: ParamSpec
    box: Box
    """In global indices."""
    ranks: tuple[int, ...]
    """Ascending."""
    level: ZeroLevel = 0
    in_one_stage: bool = True
    """All holders, or those of each domain, are ranks of one mesh."""
    in_one_precision: bool = True
    """All holders compute with it in the same dtype."""
    domains: tuple[tuple[int, ...], ...] = ()
    """The holders apart by domain, in the order of domains; empty: they are in one."""

    shares: tuple[int, ...] = ()
    """By rank, weight of what it keeps of what the level names; empty: alike."""
    cast: str = ""
    """As the plan has ``sums``."""
    reduction: str = ""
    """As stages have it: what gradients are cast to among holders of one domain."""
    tier: Tier = "device"
    """Where holders keep all of it; ``device``: as their stages keep parameters and state."""
    rounding: str = ""
    """The scaling of the products that alone read it, where it is gathered in their eight bits."""

    @property
    def by_domain(self) -> tuple[tuple[int, ...], ...]:
        return self.domains or (self.ranks,)

    def shares_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Those of some of its ranks."""
        found = dict(zip(self.ranks, self.shares, strict=False))
        return tuple(found[rank] for rank in ranks) if found else ()

    def near(self, rank: int) -> tuple[int, ...]:
        """The holders that are in one domain with ``rank``."""
        return next(ranks for ranks in self.by_domain if rank in ranks)


def param_tilings(plan: Plan, spec: ModelSpec) -> dict[str, Tiling]:
    """Where every logical parameter lives. A tied parameter lives on each stage that uses it."""
    family = FAMILIES[spec.family]
    params, layout = family.param_specs(spec), family.layout(spec)
    tilings = {}
    for param in params:
        boxes: dict[int, tuple[Box, ...]] = {}
        for stage in stages_with(param, plan):
            dims = dims_of_param(
                param, placed(layout, stage.places) if param.of_experts else layout
            )
            if not boxes.keys() >= {*stage.mesh.ranks}:
                boxes.update(_boxes(dims, stage.mesh, family.head_dim, stage.head_rows))
        tilings[param.name] = Tiling(param.shape, boxes)
    return tilings


def _boxes(
    dims: Sequence[Dim], mesh: Mesh, head_dim: str | None, rows: tuple[int, int] | None
) -> Mapping[int, tuple[Box, ...]]:
    """What each rank holds of a parameter, of which the stage has these rows along a dimension."""
    along = [number for number, dim in enumerate(dims) if rows and dim.name == head_dim]
    if not rows or not along:
        return tiling(dims, "param", mesh).boxes
    (number,), (low, _) = along, rows
    inside = [of_rows(dim, head_dim, rows) for dim in dims]
    shift = [low if n == number else 0 for n in range(len(dims))]
    return {
        rank: tuple(Box(tuple(map(add, box.offset, shift)), box.size) for box in held)
        for rank, held in tiling(inside, "param", mesh).boxes.items()
    }


def stages_with(param: ParamSpec, plan: Plan) -> list[StagePlan]:
    """The stages, of every pipeline, that compute with a parameter."""
    return [stage for _, _, stage in plan.stages_with(param.places)]


def held_pieces(
    plan: Plan, params: Sequence[ParamSpec], tilings: Mapping[str, Tiling]
) -> dict[str, list[Held]]:
    """Each parameter cut into boxes that are held by the same ranks throughout."""
    pieces = {}
    for param in params:
        stages = stages_with(param, plan)
        precisions = {stage.precision for stage in stages}
        cut = [(box, ranks, plan.by_domain(ranks)) for box, ranks in refine(tilings[param.name])]
        groups = {near for _, _, domains in cut for near in domains}
        tier = _tier(param, stages)
        level, in_one_stage = _shared(groups, stages, tier) if param.trainable else (0, False)
        pieces[param.name] = [
            Held(
                param,
                box,
                ranks,
                _of_holders(level, ranks, param, stages, tier),
                in_one_stage=in_one_stage,
                in_one_precision=len(precisions) == 1,
                domains=domains if len(domains) > 1 else (),
                shares=_shares(stages, ranks) if level else (),
                cast=plan.sums if len(domains) > 1 else "",
                reduction=_reduction(stages),
                tier=tier,
                rounding=_rounding(param, stages),
            )
            for box, ranks, domains in cut
        ]
    return pieces


def _reduction(stages: Sequence[StagePlan]) -> str:
    """What all say; nothing where they do not say the same."""
    casts = {stage.reduction for stage in stages}
    return casts.pop() if len(casts) == 1 else ""


def _tier(param: ParamSpec, stages: Sequence[StagePlan]) -> Tier:
    """As ``Held`` has it: what is kept so comes as gathered parameters do, whoever holds it."""
    tiers = {stage.expert_tier for stage in stages} if param.of_experts else set[Tier]()
    if not param.trainable or tiers <= {"device"}:
        return "device"
    assert len(tiers) == 1, f"{param.name}: stages keep it in {tiers}"
    return tiers.pop()


def _rounding(param: ParamSpec, stages: Sequence[StagePlan]) -> str:
    """As ``Held`` has it; empty where any of the stages gathers it as it is."""
    is_factor = isinstance(param.unit, int) and len(param.shape) == 2 and param.fp8
    if not is_factor or not all(stage.gather for stage in stages):
        return ""
    products = {PRECISIONS[stage.precision].products for stage in stages}
    scalings = {each.scaling for each in products if each is not None}
    return scalings.pop() if len(products) == 1 == len(scalings) else ""


def _shares(stages: Sequence[StagePlan], ranks: Sequence[int]) -> tuple[int, ...]:
    """By rank; nothing where the stages say nothing. Of several stages of a rank the first."""
    if not any(stage.state_shares for stage in stages):
        return ()
    found: dict[int, int] = {}
    for stage in stages:
        said = stage.state_shares or (1,) * len(stage.mesh.ranks)
        found = {**dict(zip(stage.mesh.ranks, said, strict=True)), **found}
    return tuple(found[rank] for rank in ranks)


def _shared(
    groups: Collection[tuple[int, ...]], stages: Sequence[StagePlan], tier: Tier
) -> tuple[ZeroLevel, bool]:
    """At which level holders of each domain share a parameter, and whether they are one mesh's."""
    beside = [[s for s in stages if {*s.mesh.ranks} & {*near}] for near in groups]
    in_one_stage = all(len({stage.mesh.ranks for stage in found}) == 1 for found in beside)
    if tier != "device":
        return 3, in_one_stage
    level = min(stage.zero for stage in stages)
    if level == 3 and any(len(found) > 1 for found in beside):
        level = 2
    return level if any(len(near) > 1 for near in groups) else 0, in_one_stage


def _of_holders(
    level: ZeroLevel,
    ranks: Sequence[int],
    param: ParamSpec,
    stages: Sequence[StagePlan],
    tier: Tier,
) -> ZeroLevel:
    """Of one piece, where those of a parameter are shared at a level."""
    return level if len(ranks) > 1 or tier != "device" else _alone(ranks[0], param, stages)


def _alone(rank: int, param: ParamSpec, stages: Sequence[StagePlan]) -> ZeroLevel:
    """Of what one rank holds: what it keeps elsewhere comes as gathered parameters do. What is not
    trained, or several of its stages use, stays."""
    tiers = [stage.param_tier for stage in stages if rank in stage.mesh.ranks]
    return 3 if param.trainable and len(tiers) == 1 and tiers[0] != "device" else 0


def reduction_groups(
    pieces: Mapping[str, Sequence[Held]], *, sharded: bool = False
) -> list[tuple[int, ...]]:
    """Every set of ranks of a domain that shares some piece, in the one order all ranks agree on.

    ``sharded``: only those that keep a segment each.
    """
    every = [held for held in _trained(pieces) if held.level or not sharded]
    return sorted({near for held in every for near in held.by_domain if len(near) > 1})


def holders_of(
    pieces: Mapping[str, Sequence[Held]], *, apart: bool = False
) -> list[tuple[int, ...]]:
    """Every set of ranks that shares some piece, whatever their domains; ``apart``: in several."""
    every = [held for held in _trained(pieces) if held.domains or not apart]
    return sorted({held.ranks for held in every if len(held.ranks) > 1})


def _trained(pieces: Mapping[str, Sequence[Held]]) -> list[Held]:
    return [held for cut in pieces.values() for held in cut if held.spec.trainable]


def assign_owners(pieces: Mapping[str, Sequence[Held]]) -> dict[tuple[str, Box], int]:
    """Exactly one owner for every piece that is kept whole, so that elements are spread evenly.

    Owners count a piece's gradient norm and write it to checkpoints. Largest pieces first, each
    to the holder that owns least so far; ties go to the lower rank.
    """
    load: dict[int, int] = {}
    owners: dict[tuple[str, Box], int] = {}
    every = [(name, held) for name, cut in pieces.items() for held in cut if held.level == 0]
    for name, held in sorted(every, key=lambda e: (-e[1].box.numel, e[0], e[1].box)):
        owner = min(held.ranks, key=lambda rank: (load.get(rank, 0), rank))
        load[owner] = load.get(owner, 0) + held.box.numel
        owners[name, held.box] = owner
    return owners

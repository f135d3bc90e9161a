"""Which rank holds which box of which parameter, and who owns it: arithmetic from the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from weft.models.registry import FAMILIES
from weft.parallel.tensor.split import shard_box
from weft.plan.box import Box
from weft.plan.layout import Layout, Placement, Replicate
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec, ParamSpec
from weft.plan.plan import Plan
from weft.plan.tiling import Piece, Tiling, refine


@dataclass(frozen=True, slots=True)
class LocalParam:
    """A parameter that this rank holds: ``param`` stores ``box`` of the logical tensor."""

    spec: ParamSpec
    box: Box
    param: nn.Parameter
    uses: int = 1
    """Stages of this rank that compute with it."""


def param_tilings(plan: Plan, spec: ModelSpec) -> dict[str, Tiling]:
    """Where every logical parameter lives. A tied parameter lives on each stage that uses it."""
    family = FAMILIES[spec.family]
    params, layout = family.param_specs(spec), family.layout(spec)
    held: dict[str, dict[int, Box]] = {param.name: {} for param in params}
    for p, s, stage in plan.stages():
        last = len(plan.pipelines[p].stages) - 1
        parts: set[object] = set(range(*stage.layers))
        parts |= ({"embed"} if s == 0 else set()) | ({"head"} if s == last else set())
        for param in params:
            if parts & {param.part, *param.also}:
                placement = placement_of(param, layout)
                held[param.name].update(_boxes(spec, param, placement, stage.mesh))
    return {param.name: Tiling(param.shape, held[param.name]) for param in params}


def placement_of(param: ParamSpec, layout: Mapping[str, Layout]) -> Placement:
    """Where a parameter sits on the tensor-parallel axis; what the layout leaves out is whole."""
    module, _, leaf = param.name.rpartition(".")
    return layout[module].params.get(leaf, Replicate()) if module in layout else Replicate()


def _boxes(spec: ModelSpec, param: ParamSpec, placement: Placement, mesh: Mesh) -> dict[int, Box]:
    tp = mesh.size("tp")
    return {
        rank: shard_box(spec, param.shape, placement, tp, mesh.coordinate(rank)["tp"])
        for rank in mesh.ranks
    }


def tensor_groups(plan: Plan) -> list[tuple[int, ...]]:
    """The tensor-parallel groups of every stage, in the one order all ranks agree on."""
    return sorted({group for _, _, stage in plan.stages() for group in stage.mesh.groups("tp")})


def param_pieces(tilings: Mapping[str, Tiling]) -> dict[str, list[Piece]]:
    """Each parameter cut into boxes that are held by the same ranks throughout."""
    return {name: refine(tiling) for name, tiling in tilings.items()}


def reduction_groups(pieces: Mapping[str, Sequence[Piece]]) -> list[tuple[int, ...]]:
    """Every set of ranks that shares some piece, in the one order all ranks agree on."""
    return sorted({piece.ranks for cut in pieces.values() for piece in cut if len(piece.ranks) > 1})


def assign_owners(pieces: Mapping[str, Sequence[Piece]]) -> dict[tuple[str, Box], int]:
    """Exactly one owner for every piece, so that elements are spread evenly over holders.

    Owners count a piece's gradient norm and write it to checkpoints. Largest pieces first, each
    to the holder that owns least so far; ties go to the lower rank.
    """
    load: dict[int, int] = {}
    owners: dict[tuple[str, Box], int] = {}
    every = [(name, piece) for name, cut in pieces.items() for piece in cut]
    for name, piece in sorted(every, key=lambda e: (-e[1].box.numel, e[0], e[1].box)):
        owner = min(piece.ranks, key=lambda rank: (load.get(rank, 0), rank))
        load[owner] = load.get(owner, 0) + piece.box.numel
        owners[name, piece.box] = owner
    return owners

"""Which rank holds which box of which parameter, and who owns it: arithmetic from the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from weft.plan.box import Box
from weft.plan.model import ParamSpec
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


def param_tilings(plan: Plan, specs: Sequence[ParamSpec]) -> dict[str, Tiling]:
    """Where every logical parameter lives. A tied parameter lives on each stage that uses it."""
    held: dict[str, dict[int, Box]] = {spec.name: {} for spec in specs}
    for p, s, stage in plan.stages():
        last = len(plan.pipelines[p].stages) - 1
        parts: set[object] = set(range(*stage.layers))
        parts |= ({"embed"} if s == 0 else set()) | ({"head"} if s == last else set())
        for spec in specs:
            if parts & {spec.part, *spec.also}:
                held[spec.name].update(dict.fromkeys(stage.mesh.ranks, Box.whole(spec.shape)))
    return {spec.name: Tiling(spec.shape, held[spec.name]) for spec in specs}


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

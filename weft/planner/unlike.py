"""Unlike parts along an axis of a mesh: each place has of what is divided as its weight says."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product

from weft.axes.registry import AXES
from weft.config.axes import UNLIKE
from weft.config.errors import ConfigError
from weft.plan.layout import Dim
from weft.plan.plan import Plan, StagePlan
from weft.plan.tiling import split_by_weight


def check_unlike(where: str, stage: StagePlan) -> None:
    """There is a weight for each place.

    Raises:
        ConfigError: there is none, or there is nothing to divide.
    """
    for entry in UNLIKE:
        shares, ways = stage.mesh.shares(entry.name), stage.mesh.size(entry.name)
        if shares and (len(shares) != ways or ways == 1 or min(shares) < 1):
            expected = f"a number for each place along {entry.name} ({ways}), 1 or more"
            expected = expected if ways > 1 else f"none where {entry.name} is 1"
            raise ConfigError(f"{where}.{entry.shares_key}", list(shares), expected)


def refuse_idle_places(plan: Plan, dims: Collection[Dim]) -> None:
    """By its weight every place has something of all that its axis divides.

    Raises:
        ConfigError: one has not; ``dims`` are the model's.
    """
    for (p, s, stage), entry in product(plan.stages(), UNLIKE):
        shares, axis = stage.mesh.shares(entry.name), AXES[entry.name]
        divided = [dim for dim in dims if shares and axis.divides(dim, "param")]
        for dim in sorted(divided, key=lambda dim: (dim.num_groups, not dim.words, dim.name)):
            parts = split_by_weight(dim.num_groups, shares)
            if 0 in parts:
                key = f"pipelines[{p}].stages[{s}].{entry.shares_key}"
                expected = f"weights that give each place along {entry.name} some {dim.name}"
                hint = _hint(dim, parts, entry.name)
                raise ConfigError(key, list(shares), expected, hint)


def _hint(dim: Dim, parts: Sequence[int], axis: str) -> str:
    """What there is to divide, what came of it, and what would do."""
    many = dim.num_groups
    has = f"The model's {dim.words}" if dim.words else f"The model has {many} {dim.name}"
    if many < len(parts):
        way_out = f"take {axis} of {many} at most, or leave the weights out"
        return f"{has}, and unlike parts are of whole ones: {way_out}."
    given = ", ".join(map(str, parts))
    return f"{has}, of which these would have {given}: take weights that are nearer to each other."

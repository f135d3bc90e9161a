"""Unlike parts along an axis of a mesh: each place has of what is divided as its weight says."""

from __future__ import annotations

from collections.abc import Collection
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
        for many, name in sorted((dim.num_groups, dim.name) for dim in divided):
            if 0 in split_by_weight(many, shares):
                expected = f"weights with which each rank has one of the model's {many} {name}"
                hint = "A rank without one would have nothing to do for the others."
                key = f"pipelines[{p}].stages[{s}].{entry.shares_key}"
                raise ConfigError(key, list(shares), expected, hint)

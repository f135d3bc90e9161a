"""Refuse sizes of axes that a model cannot have, each of what the axes before it left."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import get_args

from weft.axes.axis import Axis
from weft.axes.held import rest_of
from weft.axes.registry import AXES
from weft.plan.layout import Dim, Form
from weft.plan.mesh import Mesh


def check_mesh(
    dims: Collection[Dim], mesh: Mesh, where: str, axes: Mapping[str, Axis] = AXES
) -> None:
    """Every axis can have its size for a model with such dimensions.

    Raises:
        ConfigError: one cannot; ``where`` says which mesh it is.
    """
    left = list(dims)
    for name, axis in axes.items():
        ways = mesh.size(name)
        axis.check(left, ways, f"{where}.{name}")
        left = [_left(axis, dim, ways) for dim in left]


def _left(axis: Axis, dim: Dim, ways: int) -> Dim:
    """The smallest part of a dimension that the axis leaves to the axes after it."""
    forms: tuple[Form, ...] = get_args(Form)
    if ways == 1 or not any(axis.divides(dim, form) for form in forms):
        return dim
    parts = [axis.part(dim, ways, position) for position in range(ways)]
    return rest_of(dim, min(sum(map(len, part)) for part in parts))

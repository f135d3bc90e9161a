"""The axes by name, in their order: outermost first where nothing else is said."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from weft.axes.axis import Axis
from weft.axes.dp.axis import DataParallel
from weft.axes.tp.axis import TensorParallel
from weft.config.axes import NAMES
from weft.plan.layout import Dim
from weft.plan.mesh import Mesh

_KNOWN = {axis.name: axis for axis in (DataParallel(), TensorParallel())}

AXES: Mapping[str, Axis] = MappingProxyType({name: _KNOWN[name] for name in NAMES})


def check_mesh(dims: Collection[Dim], mesh: Mesh, where: str) -> None:
    """Refuse a mesh with an axis of a size that it cannot have for a model with such dimensions.

    Raises:
        ConfigError: ``where`` says which mesh it is.
    """
    for name, axis in AXES.items():
        axis.check(dims, mesh.size(name), f"{where}.{name}")

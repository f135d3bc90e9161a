"""The axes that divide modules, each with its runtime."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from weft.axes.tp.axis import TensorParallel
from weft.parallel.runtime import Runtime
from weft.parallel.tensor.changes import CHANGES
from weft.parallel.tensor.modules import SPLIT_FORMS
from weft.plan.plan import Plan

RUNTIMES: Mapping[str, Runtime] = MappingProxyType(
    {TensorParallel.name: Runtime(CHANGES, SPLIT_FORMS)}
)


def axis_groups(plan: Plan) -> list[tuple[int, ...]]:
    """The groups that modules talk in, of every stage, in the one order all ranks agree on."""
    meshes = [stage.mesh for _, _, stage in plan.stages()]
    return sorted({ranks for mesh in meshes for axis in RUNTIMES for ranks in mesh.groups(axis)})

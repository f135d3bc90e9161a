"""The axes that the search divides a mesh by, and the sizes that are worth trying.

Every axis that this version runs is here by itself: which sizes a model allows, the axis says, and
what a size costs and saves follows from the logical dimensions that it divides
(``weft.cost.work``). Bounds follow too, for they are costs of single layers at each size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import prod

from weft.axes.registry import AXES
from weft.cluster.view import ChipPool
from weft.config.axes import SAMPLE_AXES
from weft.cost.work import Axes
from weft.models.registry import dims_of_model
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec
from weft.planner.options import Options

SAMPLES = SAMPLE_AXES[0]
"""The axis whose ranks compute different samples with the same parameters."""
INSIDE = tuple(name for name in AXES if name not in SAMPLE_AXES)
"""Axes that divide layers, inside a node; outermost first."""


def inner_axes(pool: ChipPool, spec: ModelSpec, options: Options) -> Iterator[Axes]:
    """Every combination of sizes that fills whole parts of a node and leaves all ranks work."""
    node, dims = pool.chips_per_node, dims_of_model(spec)
    most = min(node, options.max_split or node)
    ways = [n for n in range(1, most + 1) if node % n == 0]
    for sizes in product(ways, repeat=len(INSIDE)):
        axes = tuple(zip(INSIDE, sizes, strict=True))
        if node % prod(sizes) == 0 and all(AXES[name].allows(dims, n) for name, n in axes):
            yield axes


def mesh_axes(ways: int, inner: Axes) -> Axes:
    """Of a mesh with so many ranks that hold the same layers."""
    return ((SAMPLES, ways), *inner)


def searched_axes(mesh: Mesh) -> Axes:
    """A mesh's axes as the search writes them."""
    return mesh_axes(mesh.sample_ways, tuple((name, mesh.size(name)) for name in INSIDE))


@lru_cache(maxsize=1 << 12)
def inner_of(axes: Axes) -> Axes:
    """Those that divide layers."""
    return tuple(axis for axis in axes if axis[0] not in SAMPLE_AXES)


@lru_cache(maxsize=1 << 12)
def num_ranks(axes: Axes) -> int:
    """Of a mesh."""
    return prod(size for _, size in axes)

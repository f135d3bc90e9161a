"""The axes that the search divides a mesh by: an entry each says which sizes are worth trying.

What a size costs and saves follows from the logical dimensions that the axis divides
(``weft.cost.work``), and so do the bounds: they are costs of single layers at each size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from weft.axes.registry import AXES
from weft.cluster.view import ChipPool
from weft.cost.work import DIVISIONS, Axes
from weft.models.registry import dims_of_model
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec
from weft.planner.options import Options

TENSOR = "tp"
SAMPLES = "dp"
"""The axis whose ranks compute different samples with the same parameters."""


@dataclass(frozen=True, slots=True)
class AxisEntry:
    """An axis that divides layers, inside a node."""

    name: str
    sizes: Callable[[ChipPool, ModelSpec, Options], Sequence[int]]
    """Those to try on a kind of chip, in order; 1 is one of them."""


def tensor_sizes(pool: ChipPool, spec: ModelSpec, options: Options) -> list[int]:
    """Divisors of a node that leave every rank heads."""
    node = pool.chips_per_node
    most = min(node, options.max_tp or node)
    axis, dims = AXES[TENSOR], dims_of_model(spec)
    return [ways for ways in range(1, most + 1) if node % ways == 0 and axis.allows(dims, ways)]


INSIDE: tuple[AxisEntry, ...] = (AxisEntry(TENSOR, tensor_sizes),)
"""Outermost first."""


def inner_axes(pool: ChipPool, spec: ModelSpec, options: Options) -> Iterator[Axes]:
    """Every combination of sizes that fills whole parts of a node."""
    names = [entry.name for entry in INSIDE]
    for sizes in product(*(entry.sizes(pool, spec, options) for entry in INSIDE)):
        if pool.chips_per_node % prod(sizes) == 0:
            yield tuple(zip(names, sizes, strict=True))


def mesh_axes(ways: int, inner: Axes) -> Axes:
    """Of a mesh with so many ranks that hold the same layers."""
    return ((SAMPLES, ways), *inner)


def searched_axes(mesh: Mesh) -> Axes:
    """A mesh's axes as the search writes them."""
    return mesh_axes(mesh.size(SAMPLES), tuple((e.name, mesh.size(e.name)) for e in INSIDE))


@lru_cache(maxsize=1 << 12)
def inner_of(axes: Axes) -> Axes:
    """Those that divide layers."""
    return tuple(axis for axis in axes if DIVISIONS[axis[0]].inner != {"samples"})


def num_ranks(axes: Axes) -> int:
    """Of a mesh."""
    return prod(size for _, size in axes)

"""Which elements of a tensor each rank of a mesh holds: every axis divides what is left to it.

The only place where axes come together. Two of them may divide one dimension, or two; sizes that a
model cannot have are refused, each of what the axes before it left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import get_args

from weft.axes.axis import Axis
from weft.axes.registry import AXES
from weft.plan.box import Box
from weft.plan.layout import Dim, Form, Placement, Replicate, Shard
from weft.plan.mesh import Mesh
from weft.plan.tiling import Tiling

Ranges = tuple[range, ...]
"""Elements along one dimension in the order in which a rank stores them; at least one range, and
an empty one only where it is alone."""


def held(
    dims: Sequence[Dim],
    form: Form,
    mesh: Mesh,
    position: Mapping[str, int],
    axes: Mapping[str, Axis] = AXES,
) -> tuple[Ranges, ...]:
    """What the rank at a position of a mesh holds of each dimension of a tensor."""
    for axis in axes.values():
        _divided_by(axis, dims, form)
    return tuple(_along(dim, form, mesh, position, axes)[0] for dim in dims)


def parts_along(
    dim: Dim,
    form: Form,
    mesh: Mesh,
    position: Mapping[str, int],
    name: str,
    axes: Mapping[str, Axis] = AXES,
) -> tuple[Ranges, ...]:
    """What each rank along an axis holds, as places in what the axes before it leave to all of
    them. ``position``: of any of these ranks."""
    names = list(axes)
    before = {outer: axes[outer] for outer in names[: names.index(name)]}
    _, left = _along(dim, form, mesh, position, before)
    ways, shares = mesh.size(name), mesh.shares(name)
    return tuple(axes[name].part(left, ways, n, shares) for n in range(ways))


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
        left = [_left(axis, dim, ways, mesh.shares(name)) for dim in left]


def _left(axis: Axis, dim: Dim, ways: int, shares: Sequence[int]) -> Dim:
    """The smallest part of a dimension that the axis leaves to the axes after it."""
    forms: tuple[Form, ...] = get_args(Form)
    if ways == 1 or not any(axis.divides(dim, form) for form in forms):
        return dim
    parts = [axis.part(dim, ways, position, shares) for position in range(ways)]
    return _rest_of(dim, min(sum(map(len, part)) for part in parts))


def boxes_of(ranges: Sequence[Ranges]) -> tuple[Box, ...]:
    """The boxes of what is held along each dimension, in row-major order."""
    return tuple(
        Box(tuple(part.start for part in parts), tuple(len(part) for part in parts))
        for parts in product(*ranges)
    )


def tiling(dims: Sequence[Dim], form: Form, mesh: Mesh, axes: Mapping[str, Axis] = AXES) -> Tiling:
    """Where a tensor lies on a mesh."""
    known: dict[tuple[int, ...], tuple[Box, ...]] = {}
    names = [n for n, axis in axes.items() if any(axis.divides(dim, form) for dim in dims)]
    boxes = {}
    for rank in mesh.ranks:
        position = mesh.coordinate(rank)
        key = tuple(position[name] for name in names)
        if key not in known:
            known[key] = boxes_of(held(dims, form, mesh, position, axes))
        boxes[rank] = known[key]
    return Tiling(tuple(dim.size for dim in dims), boxes)


def placement(dims: Sequence[Dim], form: Form, axis: Axis) -> Placement:
    """How a tensor of which no rank has a mere term lies along an axis."""
    divided = _divided_by(axis, dims, form)
    return Replicate() if divided is None else Shard(divided)


def _divided_by(axis: Axis, dims: Sequence[Dim], form: Form) -> int | None:
    """The number of the one dimension that an axis divides: two would leave out most elements."""
    divided = [number for number, dim in enumerate(dims) if axis.divides(dim, form)]
    assert len(divided) <= 1, f"{axis.name} divides several dimensions of {dims}"
    return divided[0] if divided else None


def _along(
    dim: Dim, form: Form, mesh: Mesh, position: Mapping[str, int], axes: Mapping[str, Axis]
) -> tuple[Ranges, Dim]:
    """The elements that are left to a position, and what that is to be divided further."""
    mine: Ranges = (range(dim.size),)
    left = dim
    for name, axis in axes.items():
        if mesh.size(name) > 1 and axis.divides(dim, form):
            given = [shares] if (shares := mesh.shares(name)) else []  # axes may know of none
            part = axis.part(left, mesh.size(name), position[name], *given)
            mine = _inside(mine, part)
            left = _rest_of(left, sum(map(len, mine)))
    return mine, left


def _rest_of(dim: Dim, size: int) -> Dim:
    """What is left of a dimension to be divided further: whole groups, or units of one."""
    if not dim.groups:
        return replace(dim, size=size)
    group = dim.size // dim.groups
    if size % group == 0:
        return replace(dim, size=size, groups=size // group)
    return replace(dim, size=size, groups=1, units=size * dim.units // group)


def _inside(outer: Ranges, inner: Ranges) -> Ranges:
    """Ranges that count the elements of ``outer`` in order -> those of the whole dimension."""
    found = [part for wanted in inner for part in _cut(outer, wanted)]
    return tuple(joined(part for part in found if part)) or (found[0],)


def _cut(outer: Ranges, wanted: range) -> Iterator[range]:
    start = 0
    for part in outer:
        low, high = max(wanted.start - start, 0), min(wanted.stop - start, len(part))
        yield part[low : max(low, high)]
        start += len(part)


def joined(parts: Iterable[range]) -> Iterator[range]:
    """Neighbours that follow one another, as one."""
    last: range | None = None
    for part in parts:
        if last is not None and last.stop == part.start:
            last = range(last.start, part.stop)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last

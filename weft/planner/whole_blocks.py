"""Weights, and tokens, whose blocks have one scale each are divided between blocks alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

from weft.axes.held import tiling
from weft.config.axes import UNLIKE
from weft.config.errors import ConfigError
from weft.models.registry import dims_of_model, layout_of, param_specs
from weft.plan.box import Box
from weft.plan.layout import Dim, Form
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec, ParamSpec
from weft.plan.plan import Plan, Precision
from weft.precision.registry import PRECISIONS


def refuse_cut_blocks(plan: Plan, spec: ModelSpec, params: Sequence[ParamSpec]) -> None:
    """``params``: the model's, with what is said of them.

    Raises:
        ConfigError: a block of a weight, or of tokens, would have to be on two ranks.
    """
    wide = frozenset(param.name for param in params if not param.fp8)
    for p, s, stage in plan.stages():
        asked = stage.precision, wide
        cut = cut_block(spec, stage.mesh.axes, *asked, stage.mesh.unlike)
        if cut:
            key, value = _cutting(spec, stage.mesh, *asked)
            hint = "Precision fp8-rowwise has no blocks."
            expected = f"what cuts no block of precision {stage.precision}; not {cut}"
            raise ConfigError(f"pipelines[{p}].stages[{s}].{key}", value, expected, hint)


def _cutting(spec: ModelSpec, mesh: Mesh, *asked: Any) -> tuple[str, object]:
    """What of a mesh cuts blocks by itself: the size of an axis, or its weights."""
    for name in mesh.model_axes:
        axes, shares = ((name, mesh.size(name)),), mesh.shares(name)
        if cut_block(spec, axes, *asked):
            return f"mesh.{name}", mesh.size(name)
        if shares and cut_block(spec, axes, *asked, ((name, shares),)):
            return next(e.shares_key for e in UNLIKE if e.name == name), list(shares)
    raise AssertionError(f"no axis by itself cuts a block: {mesh}")


@lru_cache(maxsize=1 << 10)
def cut_block(
    spec: ModelSpec,
    axes: tuple[tuple[str, int], ...],
    precision: Precision,
    wide: frozenset[str] = frozenset(),
    unlike: tuple[tuple[str, tuple[int, ...]], ...] = (),
) -> str:
    """A part of a layer's weight, or of a sample, that begins or ends inside a block, in words;
    empty: none does.

    Args:
        wide: Those that have no blocks.
        unlike: As of a mesh.
    """
    products = PRECISIONS[precision].products
    if products is None or products.scaling != "blockwise":
        return ""
    mesh = Mesh(tuple(range(prod(size for _, size in axes))), axes, unlike)
    for dims, form, name in _with_blocks(spec, wide):
        boxes = {box for held in tiling(dims, form, mesh).boxes.values() for box in held}
        for low, high, dim in sorted(_ends(boxes, dims), key=lambda end: end[:2]):
            if low % products.block or (high % products.block and high != dim.size):
                return f"elements {low} to {high - 1} of {dim.size} of {name}"
    return ""


def _with_blocks(
    spec: ModelSpec, wide: frozenset[str]
) -> Iterator[tuple[tuple[Dim, ...], Form, str]]:
    """The dimensions of what has blocks, as which it is divided, and what it is."""
    for dims, name in _weights(spec, wide).items():
        yield dims, "param", name
    for dim in dims_of_model(spec):
        if dim.name == "seq" and dim.size:
            yield (dim,), "inner", "a sample's tokens"


def _weights(spec: ModelSpec, wide: frozenset[str]) -> dict[tuple[Dim, ...], str]:
    """The dimensions of layers' weights, and the first that has them."""
    layout = layout_of(spec)
    found: dict[tuple[Dim, ...], str] = {}
    for param in param_specs(spec):
        if param.is_matrix and param.name not in wide:
            module, _, leaf = param.name.rpartition(".")
            found.setdefault(layout[module].params[leaf][-2:], param.name)
    return found


def _ends(boxes: Iterable[Box], dims: Sequence[Dim]) -> Iterator[tuple[int, int, Dim]]:
    for box in boxes:
        yield from zip(box.offset, box.end, dims, strict=True)

"""Checksums of logical tensors: small, additive over parts, and the same under every plan.

A tensor ``x`` of rows and columns (an activation of one sample: positions and channels; a matrix)
is kept as a few random projections ``sum of x[i, j] u[i] v[j]`` with signs ``u``, ``v`` that follow
from its name and the index alone, and its sum of squares. Whoever holds a part adds up his part;
the expected square of a projection of a difference is the squared norm of the difference, so no
large tensor need be kept to see by how much two of them differ (Johnson and Lindenstrauss 1984,
with the signs of Achlioptas 2003).

Both plans' borders cut a tensor into cells. A cell lies on whole ranks under either plan, so a
difference can be laid to the ranks that hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from weft.axes.held import tiling
from weft.data.hashing import draw, make_key
from weft.parallel.params import param_tilings
from weft.plan.box import Box
from weft.plan.layout import Dim
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan

PROJECTIONS = 4
"""A difference escapes one with probability 1/2 at worst (two elements that changed places)."""

Kind = Literal["parameter", "input", "output", "gradient", "parameter gradient"]
"""``gradient`` is that of a module's output. The order is that in which a step makes them."""

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Record:
    """Checksums of one tensor, of as many samples as were computed together."""

    step: int
    """Counted from 1, as in metrics."""
    kind: Kind
    name: str
    """Of the module or the parameter in the unsplit model."""
    samples: tuple[int, ...]
    """Positions inside the global batch; ``(0,)`` for parameters."""
    cells: tuple[int, ...]
    values: Array
    """``[samples, cells, PROJECTIONS + 1]`` fp64; the last is the sum of squares."""


@dataclass(frozen=True, slots=True)
class Cells:
    """A tensor of two dimensions, cut by lines right through."""

    rows: tuple[int, ...]
    """Borders, the two ends included."""
    columns: tuple[int, ...]

    def boxes(self) -> list[Box]:
        """Row by row."""
        return [
            Box((top, left), (bottom - top, right - left))
            for (top, bottom), (left, right) in product(pairwise(self.rows), pairwise(self.columns))
        ]


@dataclass(frozen=True)
class Grid:
    """How the borders of some plans cut every tensor of a model."""

    sequence: tuple[int, ...]
    """Borders along the positions of a sample."""
    params: Mapping[str, tuple[tuple[int, ...], ...]]
    """Borders along each dimension of each parameter."""
    d_model: int

    @staticmethod
    def of(plans: Sequence[Plan], spec: ModelSpec, seq_len: int) -> Grid:
        """The common refinement of these plans' tilings."""
        borders: dict[str, list[set[int]]] = {}
        for name, tiled in (item for p in plans for item in param_tilings(p, spec).items()):
            sets = borders.setdefault(name, [set() for _ in tiled.shape])
            for box in tiled.distinct():
                for found, low, high in zip(sets, box.offset, box.end, strict=True):
                    found.update((low, high))
        params = {name: tuple(map(_ordered, sets)) for name, sets in borders.items()}
        return Grid(_ordered({0, *_ends_of_parts(plans, seq_len)}), params, spec.d_model)

    def cells(self, kind: Kind, name: str) -> Cells:
        """The cells of one tensor."""
        if kind in ("parameter", "parameter gradient"):
            first, *rest = self.params[name]
            return Cells(first, rest[0] if rest else (0, 1))
        return Cells(self.sequence, self.channels(kind, name))

    def channels(self, kind: Kind, name: str) -> tuple[int, ...]:
        """Borders along the channels of what a module takes or gives.

        A linear layer's weight says both; heads are normalised where they were made.
        """
        owner, _, leaf = name.rpartition(".")
        made_by = {"q_norm": f"{owner}.q.weight", "k_norm": f"{owner}.k.weight"}.get(leaf)
        if made_by is not None:
            return self.params[made_by][0]
        weight = self.params.get(f"{name}.weight", ())
        if len(weight) < 2 or leaf == "embed":
            return (0, self.d_model)
        return weight[1] if kind == "input" else weight[0]


def _ends_of_parts(plans: Sequence[Plan], seq_len: int) -> set[int]:
    """Where the parts of a sample end that ranks hold between modules."""
    meshes = {stage.mesh for plan in plans for _, _, stage in plan.stages()}
    rows = [tiling([Dim(name="seq", size=seq_len)], "stream", mesh) for mesh in meshes]
    return {box.end[0] for tiled in rows for box in tiled.distinct()}


def _ordered(borders: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(borders)))


@dataclass
class Sketcher:
    """Makes checksums on one rank's device."""

    grid: Grid
    device: torch.device
    _signs: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)

    def sketch(
        self, kind: Kind, name: str, x: Tensor, corner: tuple[int, int]
    ) -> tuple[tuple[int, ...], Array]:
        """Cells and values of a part ``x`` ``[samples, rows, columns]`` that begins at ``corner``.

        A part that fills a cell only in part gives its term of the cell's sums.
        """
        cells = self.grid.cells(kind, name)
        part = Box(corner, (x.shape[1], x.shape[2]))
        up = self._signs_of(name, 0, cells.rows[-1])[corner[0] : corner[0] + x.shape[1]]
        across = self._signs_of(name, 1, cells.columns[-1])[corner[1] : corner[1] + x.shape[2]]
        wide = x.detach().to(torch.float64)
        held, values = [], []
        for number, cell in enumerate(cells.boxes()):
            common = part.intersect(cell)
            if common is None:
                continue
            rows, columns = common.within(part).slices()
            inner = wide[:, rows, columns]
            sums = torch.einsum("srk,rk->sk", inner @ across[columns], up[rows])
            squares = inner.square().sum((1, 2))
            held.append(number)
            values.append(torch.cat([sums, squares[:, None]], dim=1))
        return tuple(held), torch.stack(values, dim=1).cpu().numpy()

    def _signs_of(self, name: str, dim: int, size: int) -> Tensor:
        """``[size, PROJECTIONS]`` of +1 and -1."""
        key = (name, dim, size)
        if key not in self._signs:
            drawn = draw(make_key("signs", name, dim), np.arange(size, dtype=np.int64))
            bits = (drawn[:, None] >> np.arange(8, 8 + PROJECTIONS, dtype=np.uint64)) & np.uint64(1)
            signs = torch.from_numpy(2.0 * bits.astype(np.float64) - 1.0)
            self._signs[key] = signs.to(self.device)
        return self._signs[key]

"""What sections of one kind of chip do for one microbatch, if there were memory for them.

There are millions, of which few are asked for, so that they are columns of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weft.planner.search.choice import Section
from weft.planner.search.combined import Numbers, in_order

if TYPE_CHECKING:
    from weft.cost.work import Axes
    from weft.plan.plan import Recompute
    from weft.planner.search.crossings import Column

Tried = tuple["Axes", Sequence[int], Sequence[float]]
"""Axes of a mesh, numbers of such meshes, and seconds of a layer on one by what it computes
again."""


@dataclass(frozen=True, eq=False, slots=True)
class Speeds:
    """The fastest first."""

    pool: int
    layers_per_s: Column
    """If each mesh worked on a microbatch of its own."""
    meshes: Numbers
    shapes: Sequence[tuple[Axes, Recompute]]
    number: Numbers
    """Of each section, which of the shapes."""

    @staticmethod
    def of(pool: int, tried: Iterable[Tried], recompute: Sequence[Recompute]) -> Speeds:
        """Every number of meshes with everything that may be computed again."""
        shapes = list[tuple["Axes", "Recompute"]]()
        speeds, meshes, numbers = [np.empty(0)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for axes, counts, layer_s in tried:
            many = np.array(counts, np.int64)
            speeds.append((many[:, None] / np.array(layer_s)).ravel())
            meshes.append(np.repeat(many, len(recompute)))
            numbers.append(np.tile(len(shapes) + np.arange(len(recompute)), len(many)))
            shapes += [(axes, how) for how in recompute]
        rates = np.concatenate(speeds)
        found = Speeds(pool, rates, np.concatenate(meshes), shapes, np.concatenate(numbers))
        return found._those(np.argsort(-rates, kind="stable"))

    def __len__(self) -> int:
        return len(self.meshes)

    def section(self, place: int) -> Section:
        axes, recompute = self.shapes[self.number[place]]
        return Section(self.pool, axes, int(self.meshes[place]), recompute)

    def allowed(self, allows: Callable[[Section], bool]) -> Speeds:
        """Those sections."""
        kept = [place for place in range(len(self)) if allows(self.section(place))]
        return self._those(np.array(kept, np.int64))

    def in_turn(self, *, shallow_first: bool) -> Iterator[Section]:
        """The fastest, and the best of each depth, in turn."""
        order = in_order(-self.layers_per_s, self.meshes, shallow_first=shallow_first)
        return map(self.section, order)

    def _those(self, places: Numbers) -> Speeds:
        rates, meshes = self.layers_per_s[places], self.meshes[places]
        return Speeds(self.pool, rates, meshes, self.shapes, self.number[places])

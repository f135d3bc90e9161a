"""What crosses from chip to chip between stages, at least: seconds of a sample, one way."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, overload

from weft.cost.sends import border_bytes
from weft.cost.traffic import Fabric, Far
from weft.planner.search.choice import Section, num_ranks
from weft.planner.search.costs import Costs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Column = npt.NDArray[np.float64]


class Crossings:
    """Between the chips of a problem."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        work, d_model = costs.workload, costs.shape.d_model
        self.sample_bytes = border_bytes(work.precision, 1, work.seq_len, d_model)
        self._one_s: Callable[[int], float] = cache(self._one_inside)
        self._rate: Callable[[int, int], float] = cache(self._rate_of)

    def inside_s(self, section: Section) -> float:
        """Of meshes of one kind of chip: their slowest border takes no less, where ranks of a mesh
        share what goes over it evenly.

        A mesh of whole nodes between two others sends one its activations and the other its
        gradients, both by the same way out.
        """
        per_node, ranks = self.costs.pools[section.pool].chips_per_node, num_ranks(section.axes)
        if self.costs.options.border or section.meshes == 1 or section.num_chips <= per_node:
            return 0.0
        ways = 2 if section.meshes > 2 and ranks % per_node == 0 else 1
        return ways * self._one_s(section.pool) / ranks

    @overload
    def between(self, pool: int, other: int, ranks: float) -> float: ...

    @overload
    def between(self, pool: int, other: int, ranks: Column) -> Column: ...

    def between(self, pool: int, other: int, ranks: float | Column) -> float | Column:
        """From one kind to another, where the smaller mesh has so many ranks; or each so many."""
        one, two = self.costs.pools[pool].site, self.costs.pools[other].site
        if self.costs.options.border:
            return 0 * ranks
        if one != two:
            return Far.between(one, two).seconds(self.sample_bytes) + 0 * ranks
        return self.sample_bytes / ranks / self._rate(pool, other)

    def _one_inside(self, pool: int) -> float:
        """From node to node, of one kind of chip, by one chip."""
        return self.sample_bytes / self._fabric(pool).across_bytes_s

    def _rate_of(self, pool: int, other: int) -> float:
        """Bytes a second of a rank, from one kind to another at its site."""
        one, two = self.costs.pools[pool], self.costs.pools[other]
        near = bool(one.node) and one.node == two.node
        fabrics = self._fabric(pool), self._fabric(other)
        return min(each.inside_bytes_s if near else each.across_bytes_s for each in fabrics)

    def _fabric(self, pool: int) -> Fabric:
        return self.costs.hardware(pool, self.costs.pools[pool].chips_per_node).fabric

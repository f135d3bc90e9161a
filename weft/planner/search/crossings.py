"""What crosses from chip to chip between stages, at least: seconds of a sample, one way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from weft.cost.sends import border_bytes
from weft.cost.traffic import Fabric, Far
from weft.planner.search.choice import Section, num_ranks
from weft.planner.search.costs import Costs


class Crossings:
    """Between the chips of a problem."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        work, d_model = costs.workload, costs.shape.d_model
        self.sample_bytes = border_bytes(work.precision, 1, work.seq_len, d_model)
        self.between: Callable[[int, int, int], float] = cache(self._between)
        self._inside: Callable[[int], float] = cache(self._inside_of)

    def per_sample_s(self, sections: Sequence[Section]) -> float:
        """Of a pipeline through these, in whichever order: its slowest border takes no less, where
        ranks of a mesh share what goes over it evenly."""
        if self.costs.options.border:
            return 0.0
        least = 0.0
        ranks = [num_ranks(section.axes) for section in sections]
        for number, (section, many) in enumerate(zip(sections, ranks, strict=True)):
            pool = section.pool
            is_wide = section.num_chips > self.costs.pools[pool].chips_per_node
            if is_wide and section.meshes > 1:
                least = max(least, self._inside(pool) / many)
            if len(sections) > 1:
                others = (
                    self.between(pool, other.pool, min(many, ranks[place]))
                    for place, other in enumerate(sections)
                    if place != number
                )
                least = max(least, min(others))
        return least

    def _inside_of(self, pool: int) -> float:
        """From node to node, of one kind of chip, by one chip."""
        return self.sample_bytes / self._fabric(pool).across_bytes_s

    def _between(self, pool: int, other: int, ranks: int) -> float:
        """From one kind to another, where the smaller mesh has so many ranks."""
        one, two = self.costs.pools[pool], self.costs.pools[other]
        if one.site != two.site:
            return Far.between(one.site, two.site).seconds(self.sample_bytes)
        near = bool(one.node) and one.node == two.node
        fabrics = self._fabric(pool), self._fabric(other)
        rates = (each.inside_bytes_s if near else each.across_bytes_s for each in fabrics)
        return self.sample_bytes / ranks / min(rates)

    def _fabric(self, pool: int) -> Fabric:
        return self.costs.hardware(pool, self.costs.pools[pool].chips_per_node).fabric

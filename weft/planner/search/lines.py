"""Pipelines side by side that a search found, before they are plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from weft.cluster.view import ClusterView
from weft.planner.search.arrangements import Arrangement
from weft.planner.search.choice import Line, inner_of


@dataclass(frozen=True, slots=True)
class Lines:
    """Pipelines side by side, all decided."""

    seconds: float
    lines: tuple[Line, ...]
    cluster: ClusterView
    """Whose pools the lines number."""

    @property
    def arrangement(self) -> Arrangement:
        """The pools of each."""
        return arrangement_of(self.lines)

    @property
    def likeness(self) -> object:
        """Equal for plans that a person would call the same."""
        return tuple(
            (tuple((s.pool, inner_of(s.axes), s.meshes) for s in line.sections), line.schedule)
            for line in self.lines
        )

    def uses(self, pools: set[int], cluster: ClusterView) -> bool:
        """None but these, of that cluster."""
        return self.cluster is cluster and pools.issuperset(chain(*self.arrangement))


def arrangement_of(lines: Sequence[Line]) -> Arrangement:
    """The pools of each."""
    pools = (sorted({section.pool for section in line.sections}) for line in lines)
    return tuple(map(tuple, pools))

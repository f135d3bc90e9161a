"""What of a plan this version cannot run: it may be planned for all the same, and says so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from weft.cluster.cluster import Chip
from weft.cluster.view import ClusterView
from weft.plan.plan import Plan
from weft.platform.registry import PLATFORMS


def why_not_run(plan: Plan, cluster: ClusterView) -> tuple[str, ...]:
    """A sentence for each reason; empty where it can be run on such chips.

    Args:
        cluster: The chips that the ranks of the plan count through.
    """
    every = (cluster.by_pool(stage.mesh.ranks) for _, _, stage in plan.stages())
    return tuple(dict.fromkeys(_no_family(pool.chip for pools in every for pool, _ in pools)))


def why_never_run(cluster: ClusterView, groups: Sequence[Sequence[int]]) -> str:
    """Why pipelines through these groups of pools cannot be run, whatever they are; or nothing."""
    chips = [cluster.pools[number].chip for group in groups for number in group]
    return next(_no_family(chips), "")


def _no_family(chips: Iterable[Chip]) -> Iterator[str]:
    for chip in chips:
        if chip.device not in PLATFORMS:
            known = " and ".join(PLATFORMS)
            yield f"{chip.name} needs a device family {chip.device!r}; installed are {known}."

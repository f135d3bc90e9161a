"""What of a plan this version cannot run: it may be planned for all the same, and says so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from weft.cluster.cluster import Chip
from weft.cluster.view import ClusterView
from weft.plan.plan import Plan
from weft.platform.registry import PLATFORMS


def why_not_run(plan: Plan, cluster: ClusterView) -> tuple[str, ...]:
    """A sentence for each reason; empty where it can be run on such chips.

    Args:
        cluster: The chips that the ranks of the plan count through.
    """
    chips = [cluster.pool_of(stage.mesh.ranks[0]).chip for _, _, stage in plan.stages()]
    return tuple(dict.fromkeys((*_no_family(chips), *_strangers(chips))))


def why_never_run(cluster: ClusterView, groups: Sequence[Sequence[int]]) -> str:
    """Why pipelines through these groups of pools cannot be run, whatever they are; or nothing."""
    chips = [cluster.pools[number].chip for group in groups for number in group]
    return next(chain(_no_family(chips), _strangers(chips)), "")


def _no_family(chips: Iterable[Chip]) -> Iterator[str]:
    for chip in chips:
        if chip.device not in PLATFORMS:
            known = " and ".join(PLATFORMS)
            yield f"{chip.name} needs a device family {chip.device!r}; installed are {known}."


def _strangers(chips: Iterable[Chip]) -> Iterator[str]:
    """Chips that PyTorch calls the same, and whose libraries for collectives do not meet."""
    vendors: dict[str, dict[str, None]] = {}
    for chip in chips:
        vendors.setdefault(chip.device, {})[chip.vendor] = None
    for device, names in vendors.items():
        if len(names) > 1 and device in PLATFORMS and not PLATFORMS[device].is_host:
            both = " and ".join(names)
            yield f"chips of {both} are both {device!r}, and their collectives do not join."

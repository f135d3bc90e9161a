"""What of a plan this version cannot run: it may be planned for all the same, and says so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise

from weft.cluster.cluster import Chip
from weft.cluster.view import ChipPool, ClusterView
from weft.plan.plan import PipelinePlan, Plan
from weft.platform.registry import PLATFORMS


def why_not_run(plan: Plan, cluster: ClusterView) -> tuple[str, ...]:
    """A sentence for each reason; empty where it can be run on such chips.

    Args:
        cluster: The chips that the ranks of the plan count through.
    """
    chips = [cluster.pool_of(stage.mesh.ranks[0]).chip for _, _, stage in plan.stages()]
    return tuple(dict.fromkeys((*_no_family(chips), *_borders(plan), *_strangers(chips))))


def why_never_run(cluster: ClusterView, groups: Sequence[Sequence[int]]) -> str:
    """Why pipelines through these groups of pools cannot be run, whatever they are; or nothing."""
    pools = [cluster.pools[number] for group in groups for number in group]
    for group in groups:
        for device, why in _no_borders([cluster.pools[number].chip.device for number in group]):
            return f"a pipeline through several kinds of chip on {device}. {why}"
    return next(chain(_no_family(map(_chip, pools)), _strangers(map(_chip, pools))), "")


def _chip(pool: ChipPool) -> Chip:
    return pool.chip


def no_border(device: str) -> str:
    """Why stages next to each other cannot both be on such chips; empty where they can."""
    return PLATFORMS[device].no_border if device in PLATFORMS else ""


def _no_borders(devices: Sequence[str]) -> Iterator[tuple[str, str]]:
    for device in dict.fromkeys(devices):
        if devices.count(device) > 1 and (why := no_border(device)):
            yield device, why


def unrun_border(pipeline: PipelinePlan) -> tuple[str, str] | None:
    """The device and why, of two stages next to each other that cannot both be on it."""
    for before, after in pairwise(pipeline.stages):
        device = before.device
        why = no_border(device)
        if why and after.device == device and before.mesh != after.mesh:
            return device, why
    return None


def _borders(plan: Plan) -> Iterator[str]:
    for pipeline in plan.pipelines:
        if (found := unrun_border(pipeline)) is not None:
            yield f"stages next to each other are both on {found[0]}. {found[1]}"


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

"""Has a device queues enough for the streams of a plan? Where the environment says how many."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from weft.config.errors import ConfigError
from weft.plan.plan import Plan
from weft.plan.streams import streams
from weft.platform.registry import PLATFORMS


def provide_queues(plan: Plan, rank: int, environment: MutableMapping[str, str]) -> None:
    """Let the device of a rank have as many as its streams need, where nobody said how many.

    Before the device is used for the first time.
    """
    device = plan.devices[rank]
    queues = PLATFORMS[device].queues if device in PLATFORMS else None
    if queues is not None:
        environment.setdefault(queues.variable, str(queues_for(plan, rank)))


def queues_for(plan: Plan, rank: int) -> int:
    """How many a rank provides; 0 where its device has none to provide."""
    device = plan.devices[rank]
    queues = PLATFORMS[device].queues if device in PLATFORMS else None
    if queues is None:
        return 0
    return min(queues.most, max(queues.usual, sum(streams(plan, rank).values())))


def refuse_few_queues(plan: Plan, environment: Mapping[str, str]) -> None:
    """Refuse a number with which what waits for other stages would hold up what computes.

    Raises:
        ConfigError: the variable, what it has to be, and the way out.
    """
    checked = set()
    for rank, device in enumerate(plan.devices):
        mesh = plan.rank_plan(rank).stage_plan.mesh
        queues = PLATFORMS[device].queues if device in PLATFORMS else None
        if mesh in checked or queues is None or queues.variable not in environment:
            continue
        checked.add(mesh)
        value = environment[queues.variable]
        hint = f"Unset {queues.variable}, and each rank takes what it needs."
        if not (value.isdecimal() and 1 <= int(value) <= queues.most):
            expected = f"a whole number from 1 to {queues.most}"
            raise ConfigError(queues.variable, value, expected, hint)
        found = streams(plan, rank)
        needed = min(queues.most, sum(found.values()))
        if found["channels"] and int(value) < needed:
            words = ", ".join(f"{count} {what}" for what, count in found.items() if count)
            expected = f"at least {needed} where stages send to each other (rank {rank}: {words})"
            raise ConfigError(queues.variable, value, expected, hint)

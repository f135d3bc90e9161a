"""A rank takes its device and meets the others of its plan."""

from __future__ import annotations

from weft.comm.comm import Comm
from weft.comm.join import join
from weft.comm.place import Place
from weft.plan.plan import Plan
from weft.platform.base import Platform
from weft.platform.registry import platform_named


def meet(place: Place, plan: Plan, *, timeout_s: float = 600.0) -> tuple[Comm, Platform]:
    """Join the job on the device that this rank's stage names."""
    platform = platform_named(plan.seat(place.rank).stage_plan.device)
    device = platform.device(device_number(plan, place))
    backend = platform.collective_backend
    return join(place, backend=backend, device=device, timeout_s=timeout_s), platform


def device_number(plan: Plan, place: Place) -> int:
    """How many ranks of this machine before this one use devices of the same family."""
    devices = [plan.seat(rank).stage_plan.device for rank in range(place.rank + 1)]
    return devices[place.rank - place.local_rank : place.rank].count(devices[place.rank])

"""A rank takes its device and meets the others of its plan."""

from __future__ import annotations

from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.plan.plan import Plan
from weft.platform.base import Platform
from weft.platform.registry import platform_named


def join_plan(
    address: RankAddress, plan: Plan, *, timeout_s: float = 600.0
) -> tuple[Comm, Platform]:
    """Join the job on the device that this rank's stage names."""
    platform = platform_named(plan.seat(address.rank).stage_plan.device)
    device = platform.device(device_number(plan, address))
    backend = platform.collective_backend
    return join(address, backend=backend, device=device, timeout_s=timeout_s), platform


def device_number(plan: Plan, address: RankAddress) -> int:
    """How many ranks of this machine before this one use devices of the same family."""
    devices = [plan.seat(rank).stage_plan.device for rank in range(address.rank + 1)]
    return devices[address.rank - address.local_rank : address.rank].count(devices[address.rank])

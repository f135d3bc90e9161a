"""A rank takes its device and meets the others of its plan."""

from __future__ import annotations

import torch

from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join, join_at
from weft.comm.rendezvous import Rendezvous
from weft.plan.plan import Plan
from weft.platform.base import Platform
from weft.platform.registry import platform_named


def join_plan(
    address: RankAddress, plan: Plan, *, timeout_s: float = 600.0
) -> tuple[Comm, Platform]:
    """Join the job on the device that this rank's stage names."""
    platform, device = _device(address, plan)
    backend = platform.collective_backend
    return join(address, backend=backend, device=device, timeout_s=timeout_s), platform


def join_plan_at(rendezvous: Rendezvous, plan: Plan) -> tuple[Comm, Platform]:
    """The same at a rendezvous that stays open for the next epoch."""
    platform, device = _device(rendezvous.address, plan)
    return join_at(rendezvous, backend=platform.collective_backend, device=device), platform


def _device(address: RankAddress, plan: Plan) -> tuple[Platform, torch.device]:
    platform = platform_named(plan.seat(address.rank).stage_plan.device)
    return platform, platform.device(device_number(plan, address))


def device_number(plan: Plan, address: RankAddress) -> int:
    """How many ranks of this machine before this one use devices of the same family."""
    devices = [plan.seat(rank).stage_plan.device for rank in range(address.rank + 1)]
    return devices[address.rank - address.local_rank : address.rank].count(devices[address.rank])

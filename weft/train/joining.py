"""A rank takes its device and meets the others of its plan."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.plan.plan import Plan
from weft.platform.base import Platform
from weft.platform.registry import platform_named
from weft.resolve.queues import provide_queues


def join_plan(
    address: RankAddress, plan: Plan, *, timeout_s: float = 600.0
) -> tuple[Comm, Platform]:
    """Join the job on the device that this rank's stage names."""
    platform, device = device_of(address, plan)
    comm = join(address, device=device, timeout_s=timeout_s, **platform.joining())
    return comm, platform


def device_of(
    address: RankAddress, plan: Plan, cards: Sequence[int] = ()
) -> tuple[Platform, torch.device]:
    """What a rank computes on: the one that its address or ``cards`` gives it, else the next of its
    machine's devices of the family it shall have."""
    provide_queues(plan, address.rank, os.environ)
    devices, rank = plan.devices, address.rank
    before = devices[rank - address.local_rank : rank].count(devices[rank])
    platform = platform_named(devices[rank])
    if address.card is not None:
        return platform, platform.device(address.card)
    return platform, platform.device(cards[rank] if cards else before)

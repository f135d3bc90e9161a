"""The family ``chipb`` as Weft sees it, and a way to run jobs with ranks of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from chipb.build import built

from weft.comm.address import RankAddress
from weft.platform.base import Platform
from weft.platform.registry import PLATFORMS

NAME = "chipb"


@cache
def load() -> None:
    """Teach this process's PyTorch the device. Once and for good: use processes of your own."""
    torch.ops.load_library(built())
    torch.utils.rename_privateuse1_backend(NAME)
    module = ModuleType(f"torch.{NAME}")
    functions = {
        "is_available": lambda: True,
        "device_count": torch.accelerator.device_count,
        "current_device": torch.accelerator.current_device_index,
        "get_amp_supported_dtype": lambda: [torch.bfloat16],  # recompute asks for it
    }
    vars(module).update(functions)
    torch._register_device_module(NAME, module)


class ChipbPlatform(Platform):
    """Ranks that share no library of collectives, not even with each other."""

    name = NAME
    collective_backend = "none"

    def available(self) -> bool:
        load()
        return torch.accelerator.is_available()

    def device(self, local_rank: int) -> torch.device:
        torch.accelerator.set_device_index(local_rank)
        return torch.device(NAME, local_rank)

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def peak_memory_gib(self) -> float:
        return torch.ops.chipb.peak_bytes() / 2**30


def with_chips(address: RankAddress, job: Callable[..., Any], *args: Any) -> Any:
    """``job(address, *args)`` in a process that knows the device.

    On every rank, for the next job may give the process another device, and PyTorch looks only
    once how many there are.
    """
    load()
    torch.ops.chipb.forget()
    if NAME not in PLATFORMS:
        PLATFORMS.add(ChipbPlatform())
    return job(address, *args)

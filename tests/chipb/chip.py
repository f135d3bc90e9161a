"""The family ``chipb`` as Weft sees it, and a way to run jobs with ranks of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

import torch
from chipb.build import built

from weft.comm.address import RankAddress
from weft.platform.base import Platform
from weft.platform.registry import PLATFORMS

NAME = "chipb"
UNORDERED = "no event makes it wait"
"""How the device ends what it says of two operations that nothing puts in order."""
ROOT = Path(__file__).parents[2]
PROGRAM = tuple(f"{ROOT / folder}/" for folder in ("weft", "tests"))


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
    try:
        return job(address, *args)
    except RuntimeError as error:
        if UNORDERED not in str(error):
            raise
        raise RuntimeError(f"{str(error).splitlines()[0]} (at {_place_of(error)})") from error


def _place_of(error: BaseException) -> str:
    """Where in the program the operation was that failed."""
    for frame in reversed(extract_tb(error.__traceback__)):
        if frame.filename.startswith(PROGRAM):
            return f"{frame.filename.removeprefix(f'{ROOT}/')}:{frame.lineno} {frame.name}"
    return "nowhere"

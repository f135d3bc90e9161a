"""NVIDIA devices, and AMD's through the same interface of PyTorch."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cluster.cluster import Chip
from weft.config.errors import ConfigError
from weft.platform.base import Platform, Queues, group_of
from weft.platform.pages import locked_bytes
from weft.platform.vendor import installed_torch, maker_of

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import ProcessGroup, Store

NOTED = 200_000
"""Events of memory that are kept, the last ones."""
CHANNEL_CTAS = 4
"""Thread blocks that a message may take, each a multiprocessor of 132 on an H100."""


class CudaPlatform(Platform):
    """One process a GPU, joined by NCCL (RCCL)."""

    name = "cuda"
    order = 1
    detects_chips = True
    collective_backend = "nccl"
    has_varlen = True
    has_grouped = True
    compiles = True
    has_tf32 = True
    collective_kernels = ("nccl",)
    queues = Queues("CUDA_DEVICE_MAX_CONNECTIONS", usual=8, most=32)

    def available(self) -> bool:
        import torch

        return torch.cuda.is_available()

    def build(self) -> str:
        """Vendors' builds all say "nccl"; those of one major version understand each other."""
        major, *_ = _nccl_version()
        return f"{self.collective_backend} {major} of {maker_of(installed_torch())}"

    def versions(self) -> Mapping[str, str]:
        found = {self.collective_backend: ".".join(map(str, _nccl_version()))}
        driver = _driver_version()
        return {**found, "driver": driver} if driver else found

    def why_not_available(self) -> str:
        import torch

        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            return f"{str(error).strip().partition(chr(10))[0]}."
        return ""

    def device(self, local_rank: int) -> torch.device:
        """One that this PyTorch has kernels for.

        Raises:
            ConfigError: it has none; nothing was computed yet.
        """
        import torch

        properties = torch.cuda.get_device_properties(local_rank)
        own = arch_of(properties.major, properties.minor, properties.gcnArchName)
        built = torch.cuda.get_arch_list()
        if not runs_on(built, own):
            expected = f"a card that PyTorch {torch.__version__} is built for ({', '.join(built)})"
            hint = f"Device {local_rank}, {properties.name}, is {own}: install a build that has "
            hint += "it, leave it out with CUDA_VISIBLE_DEVICES, or train with compute.device=cpu."
            raise ConfigError("compute.device", self.name, expected, hint)
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    def has_fp8(self, chip: Chip) -> bool:
        """Those of NVIDIA that have units for it; one without data may."""
        known = chip.product_flops > 0
        return chip.vendor == "NVIDIA" and (chip.peak_flops("fp8") is not None or not known)

    def multiplies_fp8(self) -> bool:
        """From compute capability 8.9 on; a build for AMD has none, as it wants other dtypes."""
        import torch

        ours = torch.cuda.is_available() and torch.version.hip is None
        return ours and torch.cuda.get_device_capability() >= (8, 9)

    def multiplies_fp8_by_group(self) -> bool:
        """PyTorch has it for 9.x and 10.x alone."""
        import torch

        return self.multiplies_fp8() and torch.cuda.get_device_capability()[0] in (9, 10)

    def compiles_fp8(self) -> bool:
        """Triton has no E4M3 before 8.9, and cuts E5M2 off before 9.0."""
        import torch

        return self.multiplies_fp8() and torch.cuda.get_device_capability() >= (9, 0)

    def multiply_fp32(self, *, tf32: bool) -> None:
        """Not by ``torch.backends.cuda.matmul.fp32_precision``: after that is "tf32", what reads
        the setting another way raises, as PyTorch's compiler does."""
        import torch

        torch.set_float32_matmul_precision("high" if tf32 else "highest")

    def page_locked(self, num_bytes: int) -> torch.Tensor:
        """As many as asked for: PyTorch's own way rounds them up to a power of two."""
        import torch

        if not num_bytes:
            return super().page_locked(0)
        driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]

        def lock(address: int, size: int) -> bool:
            return int(driver.cudaHostRegister(address, size, 0)) == 0

        flat, is_locked = locked_bytes(num_bytes, lock, driver.cudaHostUnregister)
        if not is_locked:
            with suppress(RuntimeError):  # what is asked next would be told that it was refused
                torch.zeros(1, device=self.name)
        return flat

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def peak_memory_gib(self) -> float:
        import torch

        return torch.cuda.max_memory_allocated() / 2**30

    def memory_history(self) -> Callable[[Path], None]:
        """PyTorch writes it as a pickle and its viewer reads nothing else; Weft never opens it."""
        import torch

        torch.cuda.memory._record_memory_history(max_entries=NOTED, stacks="python")

        def write(path: Path) -> None:
            try:
                torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
            finally:
                torch.cuda.memory._record_memory_history(enabled=None)

        return write

    def open_group(
        self, backend: str, store: Store, number: int, size: int, timeout: timedelta
    ) -> ProcessGroup:
        """NCCL is in PyTorch's registry of backends from 2.15 on only."""
        if backend != self.collective_backend:
            return super().open_group(backend, store, number, size, timeout)
        import torch.distributed as dist

        options = dist.ProcessGroupNCCL.Options()
        return self._nccl(store, number, size, timeout, options)

    def open_channel(
        self, backend: str, store: Store, number: int, size: int, timeout: timedelta
    ) -> ProcessGroup:
        """A receive waits on the device: it takes few multiprocessors, and what came goes first."""
        if backend != self.collective_backend:
            return super().open_channel(backend, store, number, size, timeout)
        import torch.distributed as dist

        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        with suppress(AttributeError):  # builds on old libraries have no settings
            options.config.min_ctas, options.config.max_ctas = 1, CHANNEL_CTAS
        return self._nccl(store, number, size, timeout, options)

    def _nccl(
        self, store: Store, number: int, size: int, timeout: timedelta, options: Any
    ) -> ProcessGroup:
        import torch
        import torch.distributed as dist

        options._timeout = timeout
        made = dist.ProcessGroupNCCL(store, number, size, options)
        return group_of(made, self.collective_backend, store, torch.device(self.name))


PLATFORM = CudaPlatform()


def arch_of(major: int, minor: int, gcn: str) -> str:
    """What compilers call a card: ``sm_90``, or ``gfx942``; ``gcn`` is AMD's own name for it."""
    return gcn.partition(":")[0] if gcn.startswith("gfx") else f"sm_{major}{minor}"


def runs_on(built: Sequence[str], own: str) -> bool:
    """There are kernels for the card, or code that its driver makes some from; where names say
    nothing of that kind, there are.

    Kernels run on later cards of the same major version too, ``compute_`` code on all later ones;
    what ends in "a" runs on that card alone.
    """
    if own.startswith("gfx"):
        return own in built or any("generic" in each for each in built)
    known = [each for each in built if re.fullmatch(r"(sm|compute)_\d+[af]?", each)]
    mine = _arch(own)
    for each in known:
        kind, theirs = each.partition("_")[0], _arch(each)
        is_enough = theirs == mine or (not each.endswith("a") and theirs < mine)
        if is_enough and (kind == "compute" or theirs[0] == mine[0]):
            return True
    return not known


def _arch(name: str) -> tuple[int, int]:
    """``sm_90a`` -> (9, 0)."""
    number = re.sub(r"\D", "", name)
    return int(number[:-1]), int(number[-1])


def _driver_version() -> str:
    """The latest CUDA or HIP that it knows, such as 12.8; empty where it does not say. PyTorch has
    no call for it in all of its versions."""
    import torch

    if torch.version.hip is not None:
        number = _said("libamdhip64.so", "hipDriverGetVersion")
        return f"{number // 10_000_000}.{number // 100_000 % 100}" if number else ""
    number = _said("libcuda.so.1", "cuDriverGetVersion")
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _said(library: str, call: str) -> int:
    """The number that a call of a library in this process gives; 0: it is not loaded here."""
    number = ctypes.c_int()
    with suppress(OSError, AttributeError):
        loaded = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        if getattr(loaded, call)(ctypes.byref(number)) == 0:
            return number.value
    return 0


def _nccl_version() -> tuple[int, ...]:
    """Of the library in this process; where it does not say, of the one that PyTorch was built
    with, which is all that PyTorch knows."""
    import torch
    from torch.cuda import nccl

    library = "libnccl.so.2" if torch.version.hip is None else "librccl.so.1"
    if number := _said(library, "ncclGetVersion"):
        return number // 10_000, number // 100 % 100, number % 100
    version: tuple[int, ...] = nccl.version()  # type: ignore[no-untyped-call]
    return version

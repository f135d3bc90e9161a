"""NVIDIA devices, and AMD's through the same interface of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from weft.platform.base import Platform, Queues, group_of
from weft.platform.vendor import installed_torch, maker_of

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import ProcessGroup, Store

CHANNEL_CTAS = 4
"""Thread blocks that a message may take, each a multiprocessor of 132 on an H100."""


class CudaPlatform(Platform):
    """One process a GPU, joined by NCCL (RCCL)."""

    name = "cuda"
    order = 1
    detects_chips = True
    collective_backend = "nccl"
    has_varlen = True
    queues = Queues("CUDA_DEVICE_MAX_CONNECTIONS", usual=8, most=32)

    def available(self) -> bool:
        import torch

        return torch.cuda.is_available()

    def library(self) -> str:
        """Vendors' builds all say "nccl"; those of one major version understand each other."""
        major, *_ = _nccl()
        return f"{self.collective_backend} {major} of {maker_of(installed_torch())}"

    def versions(self) -> Mapping[str, str]:
        import torch

        number = ".".join(map(str, _nccl()))
        driver: int = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
        return {
            self.collective_backend: number,
            "driver": f"{driver // 1000}.{driver % 1000 // 10}",
        }

    def device(self, local_rank: int) -> torch.device:
        import torch

        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def peak_memory_gib(self) -> float:
        import torch

        return torch.cuda.max_memory_allocated() / 2**30

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


def _nccl() -> tuple[int, ...]:
    """The version of the library that this PyTorch was built with."""
    from torch.cuda import nccl

    version: tuple[int, ...] = nccl.version()  # type: ignore[no-untyped-call]
    return version

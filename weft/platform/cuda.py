"""NVIDIA devices, and AMD's through the same interface of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from weft.platform.base import Platform, group_of
from weft.platform.vendor import installed_torch, maker_of

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import ProcessGroup, Store


class CudaPlatform(Platform):
    """One process a GPU, joined by NCCL (RCCL)."""

    name = "cuda"
    order = 1
    no_border = "Pipelines that send from GPU to GPU (NCCL) have never been run."
    detects_chips = True
    collective_backend = "nccl"
    has_varlen = True

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
        import torch
        import torch.distributed as dist

        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        made = dist.ProcessGroupNCCL(store, number, size, options)
        return group_of(made, backend, store, torch.device(self.name))


PLATFORM = CudaPlatform()


def _nccl() -> tuple[int, ...]:
    """The version of the library that this PyTorch was built with."""
    from torch.cuda import nccl

    version: tuple[int, ...] = nccl.version()  # type: ignore[no-untyped-call]
    return version

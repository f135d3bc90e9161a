"""NVIDIA devices, and AMD's through the same interface of PyTorch."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from weft.platform.base import Platform, group_of

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

    def available(self) -> bool:
        import torch

        return torch.cuda.is_available()

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

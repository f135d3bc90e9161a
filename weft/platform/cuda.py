"""NVIDIA devices, and AMD's through the same interface of PyTorch."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Store

from weft.platform.base import Platform, group_of


class CudaPlatform(Platform):
    """One process a GPU, joined by NCCL (RCCL)."""

    name = "cuda"
    collective_backend = "nccl"

    def available(self) -> bool:
        return torch.cuda.is_available()

    def device(self, local_rank: int) -> torch.device:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def peak_memory_gib(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**30

    def open_group(
        self, backend: str, store: Store, number: int, size: int, timeout: timedelta
    ) -> ProcessGroup:
        """NCCL is in PyTorch's registry of backends from 2.15 on only."""
        if backend != self.collective_backend:
            return super().open_group(backend, store, number, size, timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        made = dist.ProcessGroupNCCL(store, number, size, options)
        return group_of(made, backend, store, torch.device(self.name))

    def matmul_flops(self, dtype: torch.dtype, device: torch.device, size: int = 8192) -> float:
        return super().matmul_flops(dtype, device, size)

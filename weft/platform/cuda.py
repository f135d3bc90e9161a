"""NVIDIA devices, and AMD's through the same interface of PyTorch."""

from __future__ import annotations

import torch

from weft.platform.base import Platform


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

    def matmul_flops(self, dtype: torch.dtype, device: torch.device, size: int = 8192) -> float:
        return super().matmul_flops(dtype, device, size)

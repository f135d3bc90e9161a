"""What the rest of Weft may ask of a device family. One file a family implements it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Platform(ABC):
    """One family of devices. Everything that differs between vendors sits behind this."""

    name: str
    """As in ``StagePlan.device``, and as PyTorch names the type of device."""
    collective_backend: str
    """Native backend of ``torch.distributed``; "none": all its groups go through host memory."""

    is_host: bool = False
    """Tensors lie in the host's memory and are there when a call returns: reading never waits."""

    @abstractmethod
    def available(self) -> bool:
        """At least one device of the family can be used here."""

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """The device of the ``local_rank``-th process on this machine, made current."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until queued work is done."""

    @abstractmethod
    def peak_memory_gib(self) -> float:
        """Most memory this process has held so far: device memory, or resident memory on CPU."""

    def matmul_flops(self, dtype: torch.dtype, device: torch.device, size: int = 1024) -> float:
        """Measured FLOP/s of a square matrix product, the best of several; the peak for MFU."""
        a = torch.ones(size, size, dtype=dtype, device=device)
        out = torch.empty_like(a)
        torch.mm(a, a, out=out)
        best = min(self._time_matmul(a, out) for _ in range(5))
        return 2 * size**3 / best

    def _time_matmul(self, a: Tensor, out: Tensor) -> float:
        self.synchronize()
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        self.synchronize()
        return time.perf_counter() - start

"""Plain processors: every feature of Weft runs here."""

from __future__ import annotations

import resource

import torch

from weft.platform.base import Platform


class CpuPlatform(Platform):
    """Processes on CPU cores, joined by gloo."""

    name = "cpu"
    collective_backend = "gloo"
    is_host = True

    def available(self) -> bool:
        return True

    def device(self, local_rank: int) -> torch.device:  # noqa: ARG002
        return torch.device("cpu")

    def synchronize(self) -> None:
        return

    def peak_memory_gib(self) -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

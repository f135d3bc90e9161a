"""Plain processors: every feature of Weft runs here."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

from weft.cluster.cluster import HOST
from weft.platform.base import Platform

if TYPE_CHECKING:
    import torch


class CpuPlatform(Platform):
    """Processes on CPU cores, joined by gloo."""

    name = HOST
    order = 0
    collective_backend = "gloo"
    point_to_point = "tagged"
    is_host = True
    has_grouped = True

    def available(self) -> bool:
        return True

    def device(self, local_rank: int) -> torch.device:  # noqa: ARG002
        import torch

        return torch.device(HOST)

    def synchronize(self) -> None:
        return

    def peak_memory_gib(self) -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


PLATFORM = CpuPlatform()

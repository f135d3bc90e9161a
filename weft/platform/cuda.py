"""NVIDIA devices, and AMD's through the same interface of PyTorch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from weft.cluster.cluster import Chip, chip_of_product
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

    def chips(
        self, environment: Mapping[str, str], *, timeout_s: float, problems: list[str]
    ) -> Iterator[Chip]:
        """The GPUs that ``CUDA_VISIBLE_DEVICES`` shows, in its order, else in that of the bus."""
        rows = _nvidia_smi(environment, timeout_s, problems)
        for index in _visible(rows, environment.get("CUDA_VISIBLE_DEVICES")):
            product, memory_mib, _ = rows[index]
            chip = chip_of_product(product)
            if chip is None:
                problems.append(f"GPU {index}: {product!r} is not in the catalogue; no peak rates.")
                chip = Chip(
                    name=product, vendor="NVIDIA", memory_gib=0, peak_tflops={}, measured_tflops={}
                )
            memory = float(memory_mib) / 1024 if memory_mib.isdecimal() else 0
            yield replace(chip, memory_gib=round(memory or chip.memory_gib, 2))

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


def _nvidia_smi(
    environment: Mapping[str, str], timeout_s: float, problems: list[str]
) -> list[tuple[str, str, str]]:
    """Product name, memory in MiB and UUID of every NVIDIA GPU of the machine."""
    tool = shutil.which("nvidia-smi", path=environment.get("PATH", os.defpath))
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,uuid", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=timeout_s, check=True, errors="replace"
        )
    except subprocess.TimeoutExpired:
        problems.append(f"nvidia-smi did not answer in {timeout_s:g} s; GPUs are left out.")
        return []
    except (OSError, subprocess.CalledProcessError) as error:
        problems.append(f"nvidia-smi failed ({error}); GPUs are left out.")
        return []
    rows = []
    for line in answer.stdout.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3:
            rows.append((parts[0], parts[1], parts[2]))
        elif line.strip():
            problems.append(f"nvidia-smi said {line.strip()!r}, which names no GPU.")
    return rows


def _visible(rows: list[tuple[str, str, str]], selection: str | None) -> list[int]:
    """Row numbers that CUDA would show; like CUDA, it stops at the first name it cannot find."""
    if selection is None:
        return list(range(len(rows)))
    result: list[int] = []
    for word in (part.strip() for part in selection.split(",")):
        matches = [
            index
            for index, (_, _, uuid) in enumerate(rows)
            if word == str(index) or (word.startswith("GPU-") and uuid.startswith(word))
        ]
        if len(matches) != 1:
            break
        result += matches
    return result

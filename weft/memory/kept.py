"""Tensors in the tiers of a rank's memory.

What is on disk is mapped memory of a file without a name: an ordinary tensor of the processor,
whose pages the kernel reads and writes. Nobody else can open such a file, and it is gone when its
process is, however that ends; a run goes on from checkpoints alone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from weft.config.errors import RunError
from weft.memory.tiers import keeps_apart
from weft.precision.roles import Role


def zeros(size: Sequence[int], role: Role, device: torch.device) -> Tensor:
    """A tensor where those of a role are kept by a rank that computes on ``device``.

    Raises:
        RunError: there is no room for it on disk.
    """
    if not keeps_apart(role.tier, device.type):
        return torch.zeros(tuple(size), dtype=role.dtype, device=device)
    num_bytes = prod(size) * role.dtype.itemsize
    if role.tier == "host" or not num_bytes:
        return torch.zeros(tuple(size), dtype=role.dtype)
    try:
        with tempfile.TemporaryFile(prefix="weft-", dir=role.folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            place = f"/proc/self/fd/{file.fileno()}"
            storage = torch.UntypedStorage.from_file(place, True, num_bytes)
    except OSError as error:
        folder = role.folder or tempfile.gettempdir()
        problem = f"{folder}: {num_bytes} bytes cannot be kept there: "
        raise RunError(problem + str(error.strerror)) from error
    flat = torch.empty(0, dtype=role.dtype).set_(storage)  # type: ignore[arg-type]
    mapped: Tensor = flat.view(tuple(size))
    return mapped


def is_apart(tensor: Tensor, device: torch.device) -> bool:
    """It lies neither on this device nor, where that is the processor, in memory of its own."""
    return tensor.device.type != device.type or _is_mapped(tensor)


def forget(tensor: Tensor) -> None:
    """Let go of the memory in which what is on disk was read or written; no more than a hint."""
    _advise(tensor, mmap.MADV_DONTNEED)


def expect(tensor: Tensor) -> None:
    """Begin to read what is on disk."""
    _advise(tensor, mmap.MADV_WILLNEED)


def _is_mapped(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.untyped_storage().filename is not None


def _advise(tensor: Tensor, advice: int) -> None:
    """Of whole pages: what they hold is in the file's own, so a neighbour loses nothing."""
    if tensor.numel() and _is_mapped(tensor):
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        length = tensor.data_ptr() + tensor.nbytes - start
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)

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
from weft.memory.tiers import PIECE_BYTES, keeps_apart
from weft.platform.registry import platform_named
from weft.precision.roles import Role


def zeros(size: Sequence[int], role: Role, device: torch.device) -> Tensor:
    """A tensor where those of a role are kept by a rank that computes on ``device``.

    Raises:
        RunError: there is no room for it on disk.
    """
    if not keeps_apart(role.tier, device.type):
        return torch.zeros(tuple(size), dtype=role.dtype, device=device)
    num_bytes = prod(size) * role.dtype.itemsize
    if role.tier == "host":
        return _shaped(platform_named(device.type).page_locked(num_bytes), size, role)
    if not num_bytes:
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
    return _shaped(torch.empty(0, dtype=torch.uint8).set_(storage), size, role)  # type: ignore[arg-type]


def carry(values: Tensor, to: Tensor, *, by: torch.device) -> None:
    """Copy values of one shape between places of which one may be apart from the device ``by``.

    What changes its dtype on the way changes it there, a piece at a time: a processor takes longer
    for it than both ways take.
    """
    if values.dtype == to.dtype or values.device == to.device == by:
        to.copy_(values)
    else:
        for part, target in zip(pieces_of(values), pieces_of(to, like=values), strict=True):
            target.copy_(part.to(by).to(to.dtype))
    forget(values)


def pieces_of(tensor: Tensor, *, like: Tensor | None = None) -> Sequence[Tensor]:
    """Views of rows that are brought to a device at a time; ``like``: as many as of that."""
    like = tensor if like is None else like
    if not tensor.ndim:
        return [tensor]
    rows = max(PIECE_BYTES * len(like) // max(like.nbytes, 1), 1)
    return [tensor[first : first + rows] for first in range(0, len(tensor), rows)]


def is_apart(tensor: Tensor, device: torch.device) -> bool:
    """It lies neither on this device nor, where that is the processor, in memory of its own."""
    return tensor.device.type != device.type or _is_mapped(tensor)


def forget(tensor: Tensor) -> None:
    """Let go of the memory in which what is on disk was read or written; no more than a hint."""
    _advise(tensor, mmap.MADV_DONTNEED)


def expect(tensor: Tensor) -> None:
    """Begin to read what is on disk."""
    _advise(tensor, mmap.MADV_WILLNEED)


def _shaped(flat: Tensor, size: Sequence[int], role: Role) -> Tensor:
    shaped: Tensor = flat.view(role.dtype).view(tuple(size))
    return shaped


def _is_mapped(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.untyped_storage().filename is not None


def _advise(tensor: Tensor, advice: int) -> None:
    """Of whole pages: what they hold is in the file's own, so a neighbour loses nothing."""
    if tensor.numel() and _is_mapped(tensor):
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        length = tensor.data_ptr() + tensor.nbytes - start
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)

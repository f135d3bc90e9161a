"""Memory of the host whose pages a driver locks where they are."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class _Pages(mmap.mmap):
    """Anonymous memory. A forked process has none of it: a device writes to one copy alone."""

    unlock: Callable[[], object] | None = None

    def __new__(cls, num_bytes: int) -> _Pages:
        pages = super().__new__(cls, -1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):  # kernels without them
            pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def __del__(self) -> None:
        if self.unlock is not None:  # while the memory is still there
            self.unlock()


def locked_bytes(
    num_bytes: int, lock: Callable[[int, int], bool], unlock: Callable[[int], object]
) -> tuple[Tensor, bool]:
    """``[num_bytes]`` at zero, at least one, and whether they are locked.

    ``lock``: of an address and so many bytes; False: the driver locks no more. ``unlock``: is
    called when nobody reads them any more.
    """
    import torch

    pages = _Pages(num_bytes)
    flat = torch.frombuffer(pages, dtype=torch.uint8)
    is_locked = lock(flat.data_ptr(), num_bytes)
    if is_locked:
        pages.unlock = partial(unlock, flat.data_ptr())
    return flat, is_locked

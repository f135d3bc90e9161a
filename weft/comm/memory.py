"""Memory of messages: made once, and used again when nobody keeps what came in it.

A received tensor belongs to whoever took it: autograd keeps it for backward, deferred weight
gradients beyond that, a layer perhaps for longer. So memory is asked whether others still refer to
it. What they did with it is asked of the device before what a later receive or copy does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


def _use_count() -> Callable[[int], int] | None:
    """How PyTorch says who refers to a storage; not promised to be there in every release."""
    try:
        return torch._C._storage_Use_Count
    except AttributeError:
        return None


USE_COUNT = _use_count()
"""None: memory is made anew each time."""


@dataclass(frozen=True, slots=True)
class _Piece:
    tensor: Tensor
    references: int
    """To its storage, while nobody else has any."""

    @property
    def is_free(self) -> bool:
        return _references(self.tensor) == self.references


def _references(tensor: Tensor) -> int:
    assert USE_COUNT is not None
    return USE_COUNT(tensor.untyped_storage()._cdata)


@dataclass(slots=True)
class ReusedMemory:
    """Contiguous tensors of one device, by size and dtype."""

    device: torch.device
    is_pinned: bool = False
    """Of the host, where devices copy from it and to it."""
    made: int = 0
    """Tensors that were made since the beginning."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pieces: dict[tuple[tuple[int, ...], torch.dtype], list[_Piece]] = field(default_factory=dict)

    def take(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """One that is free until the last reference to what is returned, or to a view, is gone."""
        with self._lock:
            if USE_COUNT is None:
                self.made += 1
                return torch.empty(size, dtype=dtype, device=self.device, pin_memory=self.is_pinned)
            pieces = self._pieces.setdefault((size, dtype), [])
            free = next((piece for piece in pieces if piece.is_free), None)
            if free is None:
                made = torch.empty(size, dtype=dtype, device=self.device, pin_memory=self.is_pinned)
                free = _Piece(made, _references(made))
                pieces.append(free)
                self.made += 1
            return free.tensor.detach()

    def forget(self) -> None:
        """Let go of all: other sizes will be asked for."""
        self._pieces.clear()

"""Tensors while a call uses them: nobody may touch what is received, nor change what is sent."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Lent(ABC):
    """The tensors of one call, from its beginning until somebody waits for it."""

    data: list[bytes]
    """Of what is given."""
    is_over = False
    """What is taken has arrived."""

    @abstractmethod
    def arrive(self, values: Sequence[Tensor]) -> None:
        """Flat ``values``, on the host, for each tensor that is taken."""

    @abstractmethod
    def join(self) -> None:
        """The current stream waits for it."""


class Memory(ABC):
    """Of one family of devices."""

    @abstractmethod
    def lend(
        self, text: str, group: Any, *, given: Sequence[Tensor], taken: Sequence[Tensor]
    ) -> Lent:
        """A call begins: it reads what is ``given`` and writes what is ``taken``."""


class HostMemory(Memory):
    """Of processors. What is taken is undefined meanwhile: here it is NaN."""

    def lend(
        self, text: str, group: Any, *, given: Sequence[Tensor], taken: Sequence[Tensor]
    ) -> Lent:
        return _LentByHost(text, given, taken)


class _LentByHost(Lent):
    def __init__(self, text: str, given: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
        self._text, self._error = text, ""
        self._given, self._taken = list(given), list(taken)
        self.data = [host_bytes(tensor).tobytes() for tensor in given]
        for tensor in taken:
            if tensor.dtype != torch.bool:
                host_bytes(tensor).fill(0xFF)
        self._only_given = [t for t in given if not any(_is_same(t, other) for other in taken)]
        for tensor, data in zip(given, self.data, strict=True):
            if any(tensor is each for each in self._only_given):
                host_bytes(tensor)[:] = np.frombuffer(data, np.uint8)  # a part of what is taken
        self._before = [
            (verb, tensor, tensor.data_ptr(), host_bytes(tensor).tobytes())
            for verb, tensors in (("written", taken), ("changed", self._only_given))
            for tensor in tensors
        ]

    def arrive(self, values: Sequence[Tensor]) -> None:
        for verb, tensor, address, before in self._before:
            is_there = tensor.data_ptr() == address
            if not is_there or host_bytes(tensor).tobytes() != before:
                what = verb if is_there else "freed"
                self._error = f"memory was {what} before anybody waited for the {self._text}"
        if not self._error:
            for tensor, value in zip(self._taken, values, strict=True):
                host_bytes(tensor)[:] = host_bytes(value)
        self.is_over = True
        self._given, self._taken, self._only_given, self._before = [], [], [], []

    def join(self) -> None:
        if self._error:
            raise RuntimeError(self._error)


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.nbytes == b.nbytes


def host_bytes(tensor: Tensor) -> np.ndarray:
    """The memory itself of a contiguous tensor of the host; its storage may be resized later."""
    assert tensor.is_contiguous(), "libraries of collectives take contiguous tensors"
    if not tensor.nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()), np.uint8)


def to_tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    """Flat, and its own."""
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype)

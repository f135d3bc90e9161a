"""One rank's file in storage far away: sent as it is hashed, read in ranges."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.entry import (
    CHUNK_BYTES,
    CheckpointError,
    RankFile,
    StoredBox,
    StoredTensor,
    told,
)
from weft.checkpoint.remote.path import RemotePath
from weft.checkpoint.shard import DTYPES
from weft.plan.box import Box

_REQUESTS = 4
"""Chunks that are asked for at the same time."""
_MOST_HEADER = 100 << 20


class RemoteRankFile:
    """A rank file of which is read what is asked for, over the network each time."""

    def __init__(self, path: RemotePath, facts: RankFile) -> None:
        """Raises CheckpointError for a file that is missing, of another size, or no safetensors."""
        self._path = path
        with told("read", path):
            length = int.from_bytes(path.read(0, min(8, facts.bytes)), "little")
            if length > min(_MOST_HEADER, facts.bytes - 8):
                raise CheckpointError("is no safetensors file", file=path)
            text = path.read(8, 8 + length)
        try:
            self._tensors: dict[str, Any] = dict(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"has no readable header: {error}", file=path) from error
        self._tensors.pop("__metadata__", None)
        self._data = 8 + length
        self._end = facts.bytes

    def keys(self) -> list[str]:
        return list(self._tensors)

    def check(self, tensor: StoredTensor, stored: StoredBox) -> int:
        """Where the elements of a box begin in the file.

        Raises CheckpointError unless the file holds this box with this shape and dtype.
        """
        key = tensor.key(stored)
        expected = {"dtype": tensor.dtype, "shape": list(stored.box.size)}
        entry = self._tensors.get(key)
        if entry is None:
            raise CheckpointError("is not in the file", file=self._path, tensor=key)
        found = {name: entry.get(name) for name in expected} if isinstance(entry, dict) else entry
        start, end = _span(entry)
        if found != expected or end - start != tensor.num_bytes(stored.box):
            problem = f"the file holds {found}, the index says {expected}"
            raise CheckpointError(problem, file=self._path, tensor=key)
        if self._data + end > self._end:
            raise CheckpointError("lies behind the end of the file", file=self._path, tensor=key)
        return self._data + start

    def read_into(self, out: Tensor, tensor: StoredTensor, stored: StoredBox, box: Box) -> None:
        """As ``RankFileReader.read_into``; asks for the chunks between the first and the last
        element that is wanted."""
        start = self.check(tensor, stored)
        if box.numel == 0:
            return
        part = box.within(stored.box)
        dtype = DTYPES[tensor.dtype]
        whole = torch.empty(tensor.num_bytes(stored.box), dtype=torch.uint8)
        strides = _strides(stored.box.size)
        first = sum(o * s for o, s in zip(part.offset, strides, strict=True)) * dtype.itemsize
        last = sum((e - 1) * s for e, s in zip(part.end, strides, strict=True)) * dtype.itemsize
        for place, chunk in self._chunks(tensor, stored, start, first, last):
            whole[place : place + len(chunk)] = torch.frombuffer(chunk, dtype=torch.uint8)
        with torch.no_grad():
            out.copy_(whole.view(dtype).view(stored.box.size)[part.slices()])

    def check_box(self, tensor: StoredTensor, stored: StoredBox) -> None:
        """Raise CheckpointError unless the file holds this box, and all that was written of it."""
        start = self.check(tensor, stored)
        if stored.box.numel:
            for _ in self._chunks(tensor, stored, start, 0, tensor.num_bytes(stored.box) - 1):
                pass

    def _chunks(
        self, tensor: StoredTensor, stored: StoredBox, start: int, first: int, last: int
    ) -> Iterator[tuple[int, bytearray]]:
        """(place, bytes) of all chunks of a box between two of its bytes, compared."""
        num_bytes = tensor.num_bytes(stored.box)
        size = num_bytes if len(stored.crc32) == 1 else CHUNK_BYTES

        def chunk(number: int) -> tuple[int, bytearray]:
            low, high = number * size, min((number + 1) * size, num_bytes)
            with told("read", self._path):
                data = self._path.read(start + low, start + high)
            if (zlib.crc32(data),) != stored.crc32[number : number + 1]:
                problem = "the elements are not those that were written (checksum differs)"
                raise CheckpointError(problem, file=self._path, tensor=tensor.key(stored))
            return low, bytearray(data)

        numbers = range(first // size, last // size + 1)
        if len(numbers) == 1:
            yield chunk(numbers[0])
            return
        with ThreadPoolExecutor(_REQUESTS, "read") as pool:
            for at in range(0, len(numbers), _REQUESTS):
                yield from pool.map(chunk, numbers[at : at + _REQUESTS])


def _span(entry: object) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if isinstance(offsets, list) and len(offsets) == 2 and all(type(o) is int for o in offsets):
        return max(offsets[0], 0), offsets[1]
    return 0, -1


def _strides(size: Sequence[int]) -> list[int]:
    """Of a row-major tensor, in elements."""
    strides = [1]
    for length in reversed(size[1:]):
        strides.insert(0, strides[0] * length)
    return strides[: len(size)]

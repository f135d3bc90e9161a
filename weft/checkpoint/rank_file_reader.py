"""One rank's safetensors file, read box by box. Each chunk is compared with its checksum once.

Elements that lie together are read to where they are wanted and hashed there, chunk by chunk in
several threads: nothing is copied twice, and a chunk is in cache when it is hashed.
"""

from __future__ import annotations

import json
import mmap
import os
import weakref
import zlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.checkpoint.entry import (
    CHUNK_BYTES,
    CheckpointError,
    RankFile,
    StoredBox,
    StoredTensor,
    told,
)
from weft.checkpoint.index import resolve_inside
from weft.checkpoint.rank_file import check_size
from weft.checkpoint.shard import DTYPES, bytes_of
from weft.checkpoint.threads import in_threads
from weft.plan.box import Box


def open_rank_file(folder: Path, facts: RankFile) -> RankFileReader:
    """A file of a checkpoint.

    Raises CheckpointError for one that is missing, of another size, or not safetensors.
    """
    path = resolve_inside(folder, facts.file)
    assert isinstance(path, Path), f"{path} is far away"
    check_size(path, facts)
    try:
        safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot be read: {error}", file=path) from error
    with told("read", path):
        return RankFileReader(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))


class RankFileReader:
    """An open rank file, of which is read what is asked for."""

    def __init__(self, path: Path, handle: int) -> None:
        """``handle``: the open file, which is closed with this object; its header is sound."""
        self._path = path
        self._handle = handle
        weakref.finalize(self, os.close, handle)
        self._checked: set[tuple[str, int]] = set()
        """Chunks, by box, whose bytes are those that were written."""
        with told("read", path):
            length = int.from_bytes(os.pread(handle, 8, 0), "little")
            self._tensors: dict[str, Any] = json.loads(os.pread(handle, length, 8))
        self._tensors.pop("__metadata__", None)
        self._data = 8 + length

    def keys(self) -> list[str]:
        return list(self._tensors)

    def check(self, tensor: StoredTensor, stored: StoredBox) -> None:
        """Raise CheckpointError unless the file holds this box with this shape and dtype."""
        key = tensor.key(stored)
        entry = self._tensors.get(key)
        if entry is None:
            raise CheckpointError("is not in the file", file=self._path, tensor=key)
        shape, dtype = tuple(entry["shape"]), entry["dtype"]
        if (shape, dtype) != (stored.box.size, tensor.dtype):
            problem = (
                f"the file holds {dtype} {shape}, the index says {tensor.dtype} {stored.box.size}"
            )
            raise CheckpointError(problem, file=self._path, tensor=key)

    def read_into(self, out: Tensor, tensor: StoredTensor, stored: StoredBox, box: Box) -> None:
        """Copy elements ``box`` (global indices) of a stored box into ``out``: ``[*box.size]``, of
        any dtype, on any device.

        Every chunk that holds one of them is read once and compared with its checksum: at most the
        stored box, and two chunks more than the elements where they lie together. After an error
        ``out`` holds anything.
        """
        self.check(tensor, stored)
        if box.numel == 0:
            return
        part = box.within(stored.box)
        elements = _Elements(self, tensor, stored)
        first, last = elements.span(part)
        lie_together = last - first == part.numel * elements.width
        is_plain = out.device.type == "cpu" and out.is_contiguous()
        if lie_together and is_plain and out.dtype == DTYPES[tensor.dtype]:
            elements.read(bytes_of(out.detach()), first)
        else:
            elements.check(first, last)
            with torch.no_grad():
                out.copy_(elements.mapped()[part.slices()])

    def check_box(self, tensor: StoredTensor, stored: StoredBox) -> None:
        """Raise CheckpointError unless the file holds this box, and all that was written of it."""
        self.check(tensor, stored)
        if stored.box.numel:
            elements = _Elements(self, tensor, stored)
            elements.check(*elements.span(stored.box.within(stored.box)))

    @cached_property
    def memory(self) -> mmap.mmap:
        """The file, mapped."""
        with told("read", self._path):
            return mmap.mmap(self._handle, 0, access=mmap.ACCESS_COPY)

    def pread(self, data: memoryview, place: int) -> None:
        """Fill ``data`` from so many bytes behind the header on."""
        with told("read", self._path):
            while data:
                done = os.preadv(self._handle, [data], self._data + place)
                if not done:
                    raise CheckpointError("ends too early", file=self._path)
                data, place = data[done:], place + done

    def is_checked(self, key: str, chunk: int) -> bool:
        return (key, chunk) in self._checked

    def compare(self, key: str, chunk: int, data: memoryview, stored: StoredBox) -> None:
        """Raise CheckpointError unless this is what was written as a chunk of a box."""
        if (zlib.crc32(data),) != stored.crc32[chunk : chunk + 1]:
            problem = "the elements are not those that were written (checksum differs)"
            raise CheckpointError(problem, file=self._path, tensor=key)
        self._checked.add((key, chunk))

    def place(self, key: str) -> slice:
        """Of a box's elements: bytes behind the header."""
        return slice(*self._tensors[key]["data_offsets"])

    def view(self, place: slice) -> memoryview:
        """Some bytes behind the header, in place."""
        return memoryview(self.memory)[self._data + place.start : self._data + place.stop]


class _Elements:
    """One stored box of a file, in bytes from its first element on.

    A box without checksums is not compared: that of a copy in memory, say.
    """

    def __init__(self, file: RankFileReader, tensor: StoredTensor, stored: StoredBox) -> None:
        self._file = file
        self._tensor = tensor
        self._stored = stored
        self._key = tensor.key(stored)
        self._place = file.place(self._key)
        self._bytes = self._place.stop - self._place.start
        self._chunk = self._bytes if len(stored.crc32) == 1 else CHUNK_BYTES
        self.width = DTYPES[tensor.dtype].itemsize

    def span(self, part: Box) -> tuple[int, int]:
        """From the first byte of a part of the box to behind its last one."""
        stride, first, last = self.width, 0, self.width
        dims = list(zip(part.offset, part.end, self._stored.size, strict=True))
        for low, high, size in reversed(dims):
            first, last = first + low * stride, last + (high - 1) * stride
            stride *= size
        return first, last

    def read(self, data: memoryview, first: int) -> None:
        """Fill ``data`` from a byte on, and compare all chunks of which a byte is read."""

        def read(chunk: int) -> None:
            start, end = self._ends(chunk)
            low, high = max(start, first), min(end, first + len(data))
            mine = data[low - first : high - first]
            self._file.pread(mine, self._place.start + low)
            self._compare(chunk, mine if (low, high) == (start, end) else None)

        self._each(read, first, first + len(data))

    def check(self, first: int, last: int) -> None:
        """Compare all chunks that hold one of these bytes."""
        if self._stored.crc32:
            self._each(self._compare, first, last)

    def mapped(self) -> Tensor:
        """The whole box, not copied."""
        flat = torch.frombuffer(self._file.view(self._place), dtype=torch.uint8)
        return flat.view(DTYPES[self._tensor.dtype]).view(self._stored.size)

    def _ends(self, chunk: int) -> tuple[int, int]:
        return chunk * self._chunk, min((chunk + 1) * self._chunk, self._bytes)

    def _compare(self, chunk: int, data: memoryview | None = None) -> None:
        if not self._stored.crc32 or self._file.is_checked(self._key, chunk):
            return
        if data is None:
            start, end = (self._place.start + each for each in self._ends(chunk))
            data = self._file.view(slice(start, end))
        self._file.compare(self._key, chunk, data, self._stored)

    def _each(self, work: Callable[[int], None], first: int, last: int) -> None:
        """Do something with every chunk that holds one of these bytes."""
        chunks = range(first // self._chunk, (last - 1) // self._chunk + 1)
        in_threads(work, [(chunk,) for chunk in chunks])

"""One rank's safetensors file: written in one pass with its checksums, read box by box.

The format is a header length, a JSON header and the tensors back to back; it is written here
rather than by the library so that one tensor at a time comes to the host, and every byte is
hashed while it is written. Reading is the library's.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.checkpoint.entry import (
    CHUNK_BYTES,
    DTYPE_CODES,
    CheckpointError,
    RankFile,
    Shard,
    StoredBox,
    StoredTensor,
    rank_file_name,
    told,
)
from weft.checkpoint.index import resolve_inside
from weft.plan.box import Box


def write_rank(folder: Path, rank: int, shards: Sequence[Shard]) -> RankFile:
    """Write the boxes that ``rank`` owns, through to the disk.

    Needs nothing but its arguments, so another process may call it with host tensors. They must
    not change until it returns; a device's tensors come to the host one at a time.

    Raises:
        CheckpointError: the file cannot be written (no space, no permission). What was written
            of it is removed, so that a full disk gets its space back.
    """
    path = folder / rank_file_name(rank)
    ordered = sorted(shards, key=lambda shard: (-shard.tensor.element_size(), shard.key))
    assert len({shard.key for shard in shards}) == len(shards), f"rank {rank} writes a box twice"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            out = _HashedFile(file)
            out.write(memoryview(_header(ordered)))
            written = {shard.key: _write_shard(out, path.name, shard) for shard in ordered}
            file.flush()
            os.fsync(file.fileno())
            tensors = tuple(written[shard.key] for shard in shards)
            return RankFile(path.name, file.tell(), out.sha256.hexdigest(), tensors)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise CheckpointError(f"cannot be written: {error.strerror}", file=path) from error


class _HashedFile:
    """Writes bytes and hashes them on the way, so that they are not read again."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, data: memoryview) -> tuple[int, ...]:
        """Write bytes and return the crc32 of each of their chunks."""
        checksums = []
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            self.sha256.update(chunk)
            checksums.append(zlib.crc32(chunk))
            self._file.write(chunk)
        return tuple(checksums)


def _header(shards: Sequence[Shard]) -> bytes:
    """Header length and header; widest elements first, so that every tensor is aligned."""
    entries: dict[str, object] = {"__metadata__": {"format": "weft"}}
    start = 0
    for shard in shards:
        end = start + shard.tensor.nbytes
        entries[shard.key] = {
            "dtype": DTYPE_CODES[shard.tensor.dtype],
            "shape": shard.box.size,
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_shard(out: _HashedFile, file: str, shard: Shard) -> StoredTensor:
    crc32 = out.write(_bytes(shard.tensor.detach().to("cpu")))
    return StoredTensor(
        kind=shard.kind,
        name=shard.name,
        shape=shard.shape,
        dtype=DTYPE_CODES[shard.tensor.dtype],
        boxes=(StoredBox(file, shard.box.offset, shard.box.size, crc32),),
    )


def _bytes(tensor: Tensor) -> memoryview:
    """The elements in row-major order; a copy only if they are not stored so."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


class RankFileReader:
    """An open rank file. Holds a memory map, and reads what is asked for.

    Raises CheckpointError for a file that is missing, of another size, or not safetensors.
    """

    def __init__(self, folder: Path, facts: RankFile) -> None:
        self._path = resolve_inside(folder, facts.file)
        check_size(self._path, facts)
        self._checked: set[tuple[str, int]] = set()
        """Chunks, by box, whose bytes are those that were written."""
        try:
            self._file: Any = safe_open(self._path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot be read: {error}", file=self._path) from error

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def check(self, tensor: StoredTensor, stored: StoredBox) -> None:
        """Raise CheckpointError unless the file holds this box with this shape and dtype."""
        key = tensor.key(stored)
        try:
            view = self._file.get_slice(key)
        except SafetensorError as error:
            raise CheckpointError("is not in the file", file=self._path, tensor=key) from error
        shape, dtype = tuple(view.get_shape()), view.get_dtype()
        if (shape, dtype) != (stored.box.size, tensor.dtype):
            problem = (
                f"the file holds {dtype} {shape}, the index says {tensor.dtype} {stored.box.size}"
            )
            raise CheckpointError(problem, file=self._path, tensor=key)

    def read(self, tensor: StoredTensor, stored: StoredBox, box: Box) -> Tensor:
        """Elements ``box`` (global indices) of a stored box: ``[*box.size]``, a view of the file.

        Every chunk that holds one of them is read once and compared with its checksum, before
        anything in it is given out: at most the stored box, and two chunks more than the elements
        where they lie together.
        """
        self.check(tensor, stored)
        key = tensor.key(stored)
        try:
            whole: Tensor = self._file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot be read: {error}", file=self._path, tensor=key
            ) from error
        if box.numel == 0:
            return whole.new_empty(box.size)
        part = box.within(stored.box)
        self._check_elements(key, whole, stored, part)
        return whole[part.slices()]

    def _check_elements(self, key: str, whole: Tensor, stored: StoredBox, part: Box) -> None:
        data = _bytes(whole)
        size = CHUNK_BYTES if len(stored.crc32) > 1 else len(data)
        lines = list(zip(part.offset, part.end, whole.stride(), strict=True))
        first = sum(low * stride for low, _, stride in lines) * whole.element_size()
        last = sum((high - 1) * stride for _, high, stride in lines) * whole.element_size()
        for chunk in range(first // size, last // size + 1):
            if (key, chunk) in self._checked:
                continue
            found = zlib.crc32(data[chunk * size : (chunk + 1) * size])
            if (found,) != stored.crc32[chunk : chunk + 1]:
                problem = "the elements are not those that were written (checksum differs)"
                raise CheckpointError(problem, file=self._path, tensor=key)
            self._checked.add((key, chunk))


def check_size(path: Path, facts: RankFile) -> None:
    """Raise CheckpointError unless the file is there with the size that was written."""
    with told("read", path):
        try:
            info = path.stat()
        except FileNotFoundError as error:
            raise CheckpointError("is missing", file=path) from error
    if not stat.S_ISREG(info.st_mode):
        raise CheckpointError("is not a file", file=path)
    if info.st_size != facts.bytes:
        raise CheckpointError(f"has {info.st_size} bytes, {facts.bytes} were written", file=path)

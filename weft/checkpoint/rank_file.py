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
    DTYPE_CODES,
    CheckpointError,
    RankFile,
    Shard,
    StoredBox,
    StoredTensor,
)
from weft.checkpoint.index import rank_file_name, resolve_inside
from weft.plan.box import Box

_CHUNK_BYTES = 4 << 20
"""Small enough to stay in cache between the checksums and the write."""


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
            return RankFile(path.name, file.tell(), out.hexdigest(), tensors)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise CheckpointError(f"cannot be written: {error.strerror}", file=path) from error


class _HashedFile:
    """Writes bytes and hashes them on the way, so that they are not read again."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()

    def write(self, data: memoryview) -> int:
        """Write bytes and return their crc32."""
        crc = 0
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            self._sha256.update(chunk)
            crc = zlib.crc32(chunk, crc)
            self._file.write(chunk)
        return crc

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


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
        boxes=(StoredBox(file, shard.box, crc32),),
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

        A box that is read whole is compared with its checksum; a part of one cannot be.
        """
        self.check(tensor, stored)
        key = tensor.key(stored)
        try:
            if box != stored.box:
                part: Tensor = self._file.get_slice(key)[box.within(stored.box).slices()]
                return part
            whole: Tensor = self._file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot be read: {error}", file=self._path, tensor=key
            ) from error
        if zlib.crc32(_bytes(whole)) != stored.crc32:
            raise CheckpointError(
                "the elements are not those that were written (checksum differs)",
                file=self._path,
                tensor=key,
            )
        return whole


def check_size(path: Path, facts: RankFile) -> None:
    """Raise CheckpointError unless the file is there with the size that was written."""
    try:
        info = path.stat()
    except FileNotFoundError as error:
        raise CheckpointError("is missing", file=path) from error
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=path) from error
    if not stat.S_ISREG(info.st_mode):
        raise CheckpointError("is not a file", file=path)
    if info.st_size != facts.bytes:
        raise CheckpointError(f"has {info.st_size} bytes, {facts.bytes} were written", file=path)

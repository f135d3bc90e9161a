"""One rank's safetensors file: written in one pass with its checksums.

The format is a header length, a JSON header and the tensors back to back; it is written here
rather than by the library so that one tensor at a time comes to the host, and every byte is
hashed while it is written. Needs no PyTorch, so that a small process can do it.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from weft.checkpoint.entry import (
    CHUNK_BYTES,
    WIDTHS,
    CheckpointError,
    Piece,
    RankFile,
    StoredBox,
    StoredTensor,
    rank_file_name,
)
from weft.checkpoint.place import Place, size_of

_AHEAD = 4
"""Chunks that may be written before they are hashed."""


def write_pieces(
    folder: Path, rank: int, pieces: Sequence[Piece], data: Callable[[Piece], memoryview]
) -> RankFile:
    """Write the boxes that ``rank`` owns, through to the disk.

    Args:
        data: The elements of a piece in row-major order; asked for once each, in the file's order.

    Raises:
        CheckpointError: the file cannot be written (no space, no permission). What was written
            of it is removed, so that a full disk gets its space back.
    """
    path = folder / rank_file_name(rank)
    ordered = in_file_order(pieces)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file, _HashedFile(file) as out:
            out.write(memoryview(header(ordered)))
            checksums = {piece.key: out.write(data(piece)) for piece in ordered}
            file.flush()
            os.fsync(file.fileno())
            crc32 = {key: [future.result() for future in each] for key, each in checksums.items()}
            tensors = tuple(stored(piece, path.name, crc32[piece.key]) for piece in pieces)
            return RankFile(path.name, file.tell(), out.sha256(), tensors)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise CheckpointError(f"cannot be written: {error.strerror}", file=path) from error


def in_file_order(pieces: Sequence[Piece]) -> list[Piece]:
    """Widest elements first, so that every tensor is aligned."""
    return sorted(pieces, key=lambda piece: (-WIDTHS[piece.dtype], piece.key))


def header(ordered: Sequence[Piece]) -> bytes:
    """Header length and header of a file that holds these pieces in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "weft"}}
    start = 0
    for piece in ordered:
        end = start + piece.nbytes
        entries[piece.key] = {
            "dtype": piece.dtype,
            "shape": piece.box.size,
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _HashedFile:
    """Writes bytes and hashes them meanwhile, so that they are not read again.

    Each checksum has a thread of its own.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._whole = hashlib.sha256()
        self._of_whole = ThreadPoolExecutor(1, "sha256")
        self._of_chunks = ThreadPoolExecutor(1, "crc32")
        self._under_way: deque[Future[Any]] = deque()

    def __enter__(self) -> _HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in (self._of_whole, self._of_chunks):
            pool.shutdown(cancel_futures=True)

    def write(self, data: memoryview) -> list[Future[int]]:
        """Write bytes, which must not change any more; each of their chunks has its crc32."""
        checksums = []
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            checksums.append(self._of_chunks.submit(zlib.crc32, chunk))
            self._under_way += (checksums[-1], self._of_whole.submit(self._whole.update, chunk))
            self._file.write(chunk)
            self._let(_AHEAD)
        return checksums

    def sha256(self) -> str:
        """Of everything that was written."""
        self._let(0)
        return self._whole.hexdigest()

    def _let(self, most: int) -> None:
        """Wait until at most so many chunks are not hashed yet."""
        while len(self._under_way) > 2 * most:
            self._under_way.popleft().result()


def stored(piece: Piece, file: str, crc32: Sequence[int]) -> StoredTensor:
    """A piece as an index has it. ``crc32``: of its chunks."""
    boxes = (StoredBox(file, piece.box.offset, piece.box.size, tuple(crc32)),)
    return StoredTensor(
        kind=piece.kind, name=piece.name, shape=piece.shape, dtype=piece.dtype, boxes=boxes
    )


def check_size(path: Place, facts: RankFile) -> None:
    """Raise CheckpointError unless the file is there with the size that was written."""
    size = size_of(path)
    if size != facts.bytes:
        raise CheckpointError(f"has {size} bytes, {facts.bytes} were written", file=path)

"""A rank's state in memory that another process may read: byte for byte the file it will become."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from weft.checkpoint.entry import Piece
from weft.checkpoint.rank_file import header, in_file_order
from weft.plan.box import Box

_LOOKED_AT = 1 << 12
_OF = 1 << 20


class Image:
    """Memory laid out as a rank's file. Several processes may have it; the last one frees it.

    Attributes:
        pieces: In the file's order.
        handle: An open file of it, closed with this object.
        pieces_bytes: How much behind the file's bytes says which pieces they are.
    """

    def __init__(self, handle: int, pieces: Sequence[Piece], pieces_bytes: int) -> None:
        self.pieces = pieces
        self.handle = handle
        self.pieces_bytes = pieces_bytes
        self._places: dict[Piece, slice] = {}
        end = len(header(pieces))
        for piece in pieces:
            self._places[piece] = slice(end, end + piece.nbytes)
            end += piece.nbytes
        self._memory = mmap.mmap(handle, end)
        self.close = weakref.finalize(self, os.close, handle)  # until here it is the caller's

    def __len__(self) -> int:
        """Bytes of the file."""
        return len(self._memory)

    def place(self, piece: Piece) -> slice:
        """Where the elements of a piece are, in bytes."""
        return self._places[piece]

    def data(self, piece: Piece) -> memoryview:
        """The elements of a piece, in place."""
        return memoryview(self._memory)[self.place(piece)]

    def guard(self, name: str) -> int:
        """A checksum of a small part of every mebibyte, for the save ``name``: another one where
        any other copy, or a part of one, lies here. One element that changed may not be seen."""
        data = memoryview(self._memory)
        found = zlib.crc32(f"{name} {len(data)} {self.pieces_bytes}".encode())
        for start in range(0, len(data), _OF):
            found = zlib.crc32(data[start : start + _LOOKED_AT], found)
        return zlib.crc32(data[-_LOOKED_AT:], found)


def new_image(pieces: Sequence[Piece]) -> Image:
    """Memory for these pieces.

    Raises OSError where there is no memory of that kind.
    """
    ordered = in_file_order(pieces)
    head = header(ordered)
    text = json.dumps(pieces_json(ordered)).encode()
    num_bytes = len(head) + sum(piece.nbytes for piece in ordered)
    handle = memory_file()
    os.ftruncate(handle, num_bytes + len(text))
    os.pwrite(handle, head, 0)
    os.pwrite(handle, text, num_bytes)
    return Image(handle, ordered, len(text))


def opened_image(handle: int, pieces_bytes: int) -> Image:
    """What another process handed over."""
    text = os.pread(handle, pieces_bytes, os.fstat(handle).st_size - pieces_bytes)
    return Image(handle, pieces_from_json(json.loads(text)), pieces_bytes)


def pieces_json(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """What one rank tells others."""
    return [asdict(piece) for piece in pieces]


def pieces_from_json(data: Sequence[dict[str, Any]]) -> list[Piece]:
    """What ``pieces_json`` gave."""
    return [_piece(dict(entry)) for entry in data]


def _piece(data: dict[str, object]) -> Piece:
    box = data.pop("box")
    assert isinstance(box, dict), box
    data["shape"] = tuple(data["shape"])  # type: ignore[arg-type]
    return Piece(**data, box=Box(tuple(box["offset"]), tuple(box["size"])))  # type: ignore[arg-type]


def memory_file() -> int:
    """An open file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("weft-snapshot", os.MFD_CLOEXEC)
    with tempfile.NamedTemporaryFile(prefix="weft-snapshot-") as file:
        return os.dup(file.fileno())

"""A rank's state in memory that another process may read: byte for byte the file it will become."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict

from weft.checkpoint.entry import Piece
from weft.checkpoint.rank_file import header, in_file_order
from weft.plan.box import Box


class Image:
    """Memory laid out as a rank's file. Several processes may have it; the last one frees it.

    Attributes:
        pieces: In the file's order.
    """

    def __init__(self, handle: int, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self._places: dict[Piece, slice] = {}
        end = len(header(pieces))
        for piece in pieces:
            self._places[piece] = slice(end, end + piece.nbytes)
            end += piece.nbytes
        self._memory = mmap.mmap(handle, end)

    def place(self, piece: Piece) -> slice:
        """Where the elements of a piece are, in bytes."""
        return self._places[piece]

    def data(self, piece: Piece) -> memoryview:
        """The elements of a piece, in place."""
        return memoryview(self._memory)[self.place(piece)]


def new_image(pieces: Sequence[Piece]) -> tuple[Image, int, int]:
    """Memory for these pieces; an open file of it, to be handed over and closed; and how many
    bytes behind the image say which pieces they are.

    Raises OSError where there is no memory of that kind.
    """
    ordered = in_file_order(pieces)
    head = header(ordered)
    text = json.dumps([asdict(piece) for piece in ordered]).encode()
    num_bytes = len(head) + sum(piece.nbytes for piece in ordered)
    handle = _memory_file()
    os.ftruncate(handle, num_bytes + len(text))
    os.pwrite(handle, head, 0)
    os.pwrite(handle, text, num_bytes)
    return Image(handle, ordered), handle, len(text)


def opened_image(handle: int, pieces_bytes: int) -> Image:
    """What a rank handed over."""
    try:
        text = os.pread(handle, pieces_bytes, os.fstat(handle).st_size - pieces_bytes)
        return Image(handle, [_piece(entry) for entry in json.loads(text)])
    finally:
        os.close(handle)


def _piece(data: dict[str, object]) -> Piece:
    box = data.pop("box")
    assert isinstance(box, dict), box
    data["shape"] = tuple(data["shape"])  # type: ignore[arg-type]
    return Piece(**data, box=Box(tuple(box["offset"]), tuple(box["size"])))  # type: ignore[arg-type]


def _memory_file() -> int:
    """An open file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("weft-snapshot", os.MFD_CLOEXEC)
    with tempfile.NamedTemporaryFile(prefix="weft-snapshot-") as file:
        return os.dup(file.fileno())

"""Checksums of a token file, piece by piece: taken while it is written, compared when it is read.

A piece is compared once, before the first token in it is given out, and again where somebody has
written to its file since; what a run never reads it never checks.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft.config.errors import RunError

PIECE_BYTES = 1 << 18
"""Small enough that the first window out of a piece costs little more than the window."""

Tokens = npt.NDArray[np.integer]


class TokenFileError(RunError):
    """A token file cannot be what its index says. Names the file, what is wrong, the way out."""

    def __init__(
        self,
        path: Path,
        problem: str,
        way_out: str = "Copy it again, or delete its folder to rebuild it",
    ) -> None:
        super().__init__(f"{path}: {problem}. {way_out}.")
        self.path = path
        self.problem = problem


class PieceSums:
    """The crc32 of each piece of a stream of bytes, as they are written."""

    def __init__(self) -> None:
        self._whole: list[int] = []
        self._crc32 = 0
        self._filled = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        rest = memoryview(data)
        while rest:
            part = rest[: PIECE_BYTES - self._filled]
            rest = rest[len(part) :]
            self._crc32 = zlib.crc32(part, self._crc32)
            self._filled += len(part)
            if self._filled == PIECE_BYTES:
                self._whole.append(self._crc32)
                self._crc32 = self._filled = 0

    def text(self) -> str:
        """All of them, eight hexadecimal digits each, in order."""
        last = [self._crc32] if self._filled else []
        return "".join(f"{crc32:08x}" for crc32 in (*self._whole, *last))


class PieceCheck:
    """Compares pieces of an open token file with the checksums it was written with."""

    def __init__(self, path: Path, tokens: Tokens, crc32: str) -> None:
        """``tokens [n]``: all of the file; ``crc32``: what ``PieceSums.text`` gave."""
        self._path = path
        self._bytes = tokens.view(np.uint8).data
        self._width = tokens.itemsize
        self._crc32 = np.frombuffer(bytes.fromhex(crc32), ">u4")
        self._same = np.zeros(-(-self._bytes.nbytes // PIECE_BYTES), np.bool_)
        """``[pieces]`` those that were compared, and were what was written."""
        assert self._same.size == self._crc32.size, f"{path}: {self._crc32.size} checksums"
        self._opened = path.stat()

    def check(self, starts: npt.NDArray[np.int64], length: int) -> None:
        """See that ``length`` tokens from each of ``starts`` are those that were written.

        Raises TokenFileError: they are not.
        """
        if not starts.size or not length:
            return
        self._look_again()
        first = starts * self._width // PIECE_BYTES
        last = ((starts + length) * self._width - 1) // PIECE_BYTES
        pieces = first[:, None] + np.arange(int((last - first).max()) + 1)
        pieces = np.minimum(pieces, last[:, None])
        for piece in np.unique(pieces[~self._same[pieces]]).tolist():
            low = piece * PIECE_BYTES
            if zlib.crc32(self._bytes[low : low + PIECE_BYTES]) != self._crc32[piece]:
                high = min(low + PIECE_BYTES, self._bytes.nbytes)
                problem = f"bytes {low} to {high - 1} are not those that were written"
                raise TokenFileError(self._path, f"{problem} (checksum differs)", self._way_out)
            self._same[piece] = True

    def _look_again(self) -> None:
        """Nothing is known of what has changed since; what was cut off would end the process. A
        file in its place is another one, for what was opened stays."""
        try:
            now = self._path.stat()
        except OSError:
            return
        if now.st_ino != self._opened.st_ino:
            return
        if now.st_size < self._bytes.nbytes:
            problem = f"cut short while it was read, to {now.st_size} of {self._bytes.nbytes} bytes"
            raise TokenFileError(self._path, problem, self._way_out)
        if now.st_mtime_ns != self._opened.st_mtime_ns:
            self._same[:] = False
            self._opened = now

    @property
    def _way_out(self) -> str:
        return f"Delete the folder {self._path.parent}: the next run makes it again"

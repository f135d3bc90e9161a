"""Files of a source as bytes, whether or not they are compressed."""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from weft.config.errors import ConfigError
from weft.data.sources import ROWS, Request, SourceFile, last_line_end, to_utf8

_COPIED_BYTES = 1 << 20
_SNIFFED_BYTES = 8192
_WINDOW_BYTES = 1 << 31
"""That a zstd file may look back, as the format has it: ``zstd --long=31``."""
_READ_BYTES = 1 << 16
"""Of the compressed file, at a time: what comes out of it fits in memory."""


def open_bytes(request: Request, file: SourceFile) -> BinaryIO:
    """The bytes of a text file, unpacked. One that is packed is read from its start only.

    Raises ConfigError, also while reading: it cannot be unpacked, or has rows in UTF-16.
    """
    if not file.packing:
        stream = Path(file.path).open("rb")  # noqa: SIM115 - the caller's to close
    else:
        stream = io.BufferedReader(_Unpacked(request, file), _READ_BYTES)
    if file.kind in ROWS and (hint := to_utf8(file.path, stream.peek())):
        stream.close()
        raise request.error("text in UTF-8", hint)
    return stream


def is_cut(file: SourceFile) -> bool:
    """Only the first ``file.size`` bytes in a packed file are read; they may end inside a line."""
    return bool(file.packing) and file.size < file.full_size


class _Unpacked(io.RawIOBase):
    """What a compressed file comes to; of one that is cut, its first ``file.size`` bytes."""

    def __init__(self, request: Request, file: SourceFile) -> None:
        self._request = request
        self._file = file
        self._decoder = _decoder(request, file)
        self._stream = Path(file.path).open("rb")  # noqa: SIM115 - closed in close
        self._left = file.size if is_cut(file) else sys.maxsize
        self._ready = memoryview(b"")
        self._inside = False
        """Some of the frame at hand was read, and not its end."""
        self._between = False
        """The end of a frame was read, and nothing of another."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._left and not self._ready:
            data = self._stream.read(_READ_BYTES)
            if not data:
                if self._inside:
                    raise self._error("it ends in the middle: cut short")
                return 0
            self._ready = memoryview(self._unpack(data))
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._ready), self._left)
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        self._left -= count
        return count

    def _unpack(self, data: bytes) -> bytes:
        """What the next bytes come to; several frames follow each other."""
        parts = []
        try:
            while data := data.lstrip(b"\0") if self._between else data:  # gzip allows padding
                parts.append(self._decoder.decompress(data))
                self._between = self._decoder.eof
                self._inside = not self._between
                data = self._decoder.unused_data
                if self._between:
                    self._decoder = _decoder(self._request, self._file)
        except _errors(self._file) as error:
            raise self._error(str(error)) from None
        return b"".join(parts)

    def _error(self, problem: str) -> ConfigError:
        hint = f"{self._file.path}: {problem}. Copy it again."
        return self._request.error(f"whole {self._file.packing} files", hint)

    def close(self) -> None:
        self._stream.close()
        super().close()


def _decoder(request: Request, file: SourceFile) -> Any:
    """Takes bytes by ``decompress``; has ``eof`` and ``unused_data`` after the end of a frame."""
    if file.packing == "gzip":
        return zlib.decompressobj(wbits=31)
    try:
        zstandard = import_module("zstandard")
    except ImportError:
        hint = f"{file.path} needs zstandard: pip install 'weft[zstd]'."
        raise request.error("a format that can be read here", hint) from None
    return zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()


def _errors(file: SourceFile) -> type[Exception]:
    """What the decoder raises for bytes that are not of its format."""
    if file.packing == "gzip":
        return zlib.error
    found: type[Exception] = import_module("zstandard").ZstdError
    return found


@contextmanager
def open_text(request: Request, file: SourceFile) -> Iterator[tuple[BinaryIO, int]]:
    """A file of text and its bytes, to be read from anywhere: a packed one from a copy on the disk.

    Raises ConfigError: it cannot be unpacked.
    """
    with open_bytes(request, file) as stream:
        if not file.packing:
            yield stream, file.size
            return
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(stream, copy, _COPIED_BYTES)
            size = copy.tell()
            copy.seek(0)
            if request.format == "auto" and b"\0" in copy.read(_SNIFFED_BYTES):
                hint = f"{file.path} holds zero bytes, as text does not."
                raise request.error("text in what is compressed", hint)
            if is_cut(file) and size:
                size = last_line_end(copy, size - 1)
            yield copy, size


def text_bytes(request: Request, file: SourceFile) -> int:
    """Bytes of a file of text; a packed one is unpacked for it."""
    if not file.packing:
        return file.size
    with open_text(request, file) as (_, size):
        return size

"""A place in storage far away, with as much of what a ``Path`` can do as checkpoints need."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from weft.checkpoint.remote.files import Files, Parts, open_files, pieces_of, split_address


class RemotePath:
    """A file or a folder, whether it is there or not.

    Args:
        base: ``s3://bucket``; what is below it is in ``key``.
    """

    def __init__(self, base: str, key: str, files: Files) -> None:
        self.base = base
        self.key = key
        self.files = files

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return self._at(self.key.rpartition("/")[0])

    def __truediv__(self, name: str) -> RemotePath:
        return self._at(f"{self.key}/{name}")

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def __str__(self) -> str:
        return f"{self.base}/{self.key}"

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        try:
            self.size()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """There is something in it."""
        return bool(self.files.entries(self.key))

    def iterdir(self) -> Iterator[RemotePath]:
        for name in self.files.entries(self.key):
            yield self / name

    def size(self) -> int:
        """Raises OSError where it is no file that can be read."""
        return self.files.size(self.key)

    def read_bytes(self) -> bytes:
        return b"".join(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        """All that is in it, one piece after the other."""
        yield from pieces_of(self.files, self.key, self.size())

    def read(self, start: int, end: int) -> bytes:
        """Raises OSError where it has no such bytes."""
        data = self.files.read(self.key, start, end)
        if len(data) != end - start:
            raise OSError(errno.EIO, f"gave {len(data)} of {end - start} bytes at {start}")
        return data

    def write(self, parts: Parts) -> None:
        self.files.write(self.key, parts)

    def write_bytes(self, data: bytes) -> None:
        self.write(lambda: [memoryview(data)])

    def unlink(self) -> None:
        """Nothing happens where there is none."""
        self.files.remove(self.key)

    def rmdir(self) -> None:
        """Nothing happens where folders are no more than a part of names."""
        self.files.remove_folder(self.key)

    def _at(self, key: str) -> RemotePath:
        return RemotePath(self.base, key, self.files)


def remote_path(address: str, key: str) -> RemotePath:
    """The place that an address names.

    Raises ConfigError, which names ``key``, for what is no address, or needs a package that is
    missing.
    """
    parts = split_address(address, key)
    files = open_files(parts.scheme, parts.netloc, key)
    return RemotePath(f"{parts.scheme}://{parts.netloc}", parts.path.strip("/"), files)

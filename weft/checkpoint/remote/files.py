"""Files of storage far away, and their addresses: ``s3://bucket/prefix``, ``sftp://host/path``.

Packages that speak to such storage are imported when an address is opened, and not before.
Credentials come from the environment and from the files where other tools keep them; an address
never holds any.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

from weft.config.errors import ConfigError

SCHEMES = ("s3", "sftp")
READ_BYTES = 8 << 20
"""What one request reads at most."""

Parts = Callable[[], Iterable[memoryview]]
"""The bytes of a file, from the beginning each time it is called."""


class Files(Protocol):
    """One bucket, or one host. Names are whole, with ``/``.

    What fails is an OSError whose ``strerror`` says why; FileNotFoundError for what is not there.
    """

    def entries(self, folder: str) -> dict[str, int | None]:
        """What lies in a folder, by its last name: the size of a file, None for a folder; empty
        where there is no such folder."""

    def size(self, name: str) -> int:
        """Of a file, in bytes."""

    def read(self, name: str, start: int, end: int) -> bytes:
        """Bytes ``start`` to ``end`` of a file that has them."""

    def write(self, name: str, parts: Parts) -> None:
        """Make a file, or replace it: whoever reads it sees all of it or what was there before."""

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder, where folders are more than a part of names."""


def is_address(text: str) -> bool:
    """It names storage far away, rather than a folder of this machine."""
    return "://" in text


def split_address(text: str, key: str) -> SplitResult:
    """Scheme, bucket or host, and path.

    Raises ConfigError, which names ``key``, for an address that cannot be one.
    """
    expected = "a folder, s3://BUCKET/PREFIX or sftp://[USER@]HOST[:PORT]/PATH"
    if _has_secret(text):
        hint = "Credentials belong into the environment or into the files of your tools."
        without = f"{text.partition('://')[0]}://...@{text.rpartition('@')[2]}"
        raise ConfigError(key, without, "an address without credentials", hint)
    try:
        parts = urlsplit(text)
        named, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(key, text, expected, f"{error}.") from error
    if parts.scheme not in SCHEMES or not named or not parts.path.strip("/"):
        raise ConfigError(key, text, expected)
    if parts.query or parts.fragment or ".." in parts.path.split("/"):
        raise ConfigError(key, text, expected, "It has no '?', '#' or '..'.")
    return parts


def _has_secret(text: str) -> bool:
    """It names more than a user. A secret may hold any sign, a slash too."""
    scheme, _, rest = text.partition("://")
    named = re.split(r"[/?#]", rest)[0]
    user, at, host = named.rpartition("@")
    if at and (scheme == "s3" or ":" in user):
        return True
    port = host.rpartition(":")[2]
    return "@" in rest and port != host and not port.isdecimal()


@functools.cache
def open_files(scheme: str, netloc: str, key: str) -> Files:
    """The storage behind an address.

    Raises ConfigError, which names ``key``, where the package that speaks to it is missing.
    """
    try:
        if scheme == "s3":
            from weft.checkpoint.remote.objects import ObjectFiles

            return ObjectFiles(netloc)
        from weft.checkpoint.remote.sftp import SftpFiles

        return SftpFiles(netloc)
    except ImportError as error:
        hint = f"Install what it needs with: pip install 'weft[{scheme}]'."
        expected = f"storage for which the packages are here ({error.name} is missing)"
        raise ConfigError(key, f"{scheme}://{netloc}", expected, hint) from error


def pieces_of(files: Files, name: str, size: int) -> Iterator[bytes]:
    """A file from the beginning to its end, as it is there."""
    for start in range(0, size, READ_BYTES):
        yield files.read(name, start, min(start + READ_BYTES, size))

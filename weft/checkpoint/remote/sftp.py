"""Files of an SFTP server, by sshfs (fsspec on asyncssh).

User names, keys and aliases of hosts are those of ``~/.ssh``; a host whose key is not in
``known_hosts`` is refused. A file is written under a name of its own and renamed when it is whole.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import asyncssh
from sshfs import SSHFileSystem

from weft.checkpoint.remote.files import Parts

DRAFT = ".part"
"""Ends the name of a file that is being written."""
WRITE_BYTES = 4 << 20
PAUSES_S = (0.5, 2.0)
"""Before a connection is made anew and what failed is tried again."""
_CONNECT_S = 30.0
_ALIVE_S = 15.0
"""A server that says nothing three times as long is gone."""
_LOST = (
    ConnectionError,
    TimeoutError,
    asyncssh.ConnectionLost,
    asyncssh.ChannelOpenError,
    asyncssh.SFTPConnectionLost,
    asyncssh.SFTPNoConnection,
)

T = TypeVar("T")


class SftpFiles:
    """One host, as one user."""

    def __init__(self, netloc: str) -> None:
        address = urlsplit(f"sftp://{netloc}")
        config = Path.home() / ".ssh" / "config"
        options: dict[str, Any] = {"config": [str(config)] if config.is_file() else []}
        if address.port:
            options["port"] = address.port
        if address.username:
            options["username"] = unquote(address.username)
        self._host = str(address.hostname)
        self._options = options
        self._lock = threading.Lock()
        self._connected: Any = None

    def entries(self, folder: str) -> dict[str, int | None]:
        def listed(fs: Any) -> list[dict[str, Any]]:
            try:
                return list(fs.ls(_path(folder), detail=True))
            except FileNotFoundError:
                return []

        return {
            each["name"].rpartition("/")[2]: None if each["type"] == "directory" else each["size"]
            for each in self._tried(listed)
        }

    def size(self, name: str) -> int:
        info = self._tried(lambda fs: fs.info(_path(name)))
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, f"{_path(name)} is not a file")
        return int(info["size"])

    def read(self, name: str, start: int, end: int) -> bytes:
        def read(fs: Any) -> bytes:
            with fs.open(_path(name), "rb") as file:
                file.seek(start)
                return bytes(file.read(end - start))

        return self._tried(read)

    def write(self, name: str, parts: Parts) -> None:
        def write(fs: Any) -> None:
            path = _path(name)
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            try:
                _send(fs, path + DRAFT, parts)
                fs.mv(path + DRAFT, path)
            except Exception:
                with suppress(Exception):
                    fs.rm_file(path + DRAFT)
                raise

        self._tried(write)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._tried(lambda fs: fs.rm_file(_path(name)))

    def remove_folder(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._tried(lambda fs: fs.rmdir(_path(name)))

    def _tried(self, work: Callable[[Any], T]) -> T:
        """What it gives, over a new connection where one was lost."""
        for pause_s in PAUSES_S:
            fs = None
            try:
                fs = self._connection()
                return work(fs)
            except _LOST:
                self._drop(fs)
                time.sleep(pause_s)
            except (asyncssh.Error, OSError) as error:
                raise _told(error) from error
        try:
            return work(self._connection())
        except (asyncssh.Error, OSError) as error:
            raise _told(error) from error

    def _connection(self) -> Any:
        with self._lock:
            if self._connected is None:
                self._connected = SSHFileSystem(
                    self._host,
                    known_hosts=(),  # the user's own
                    login_timeout=_CONNECT_S,
                    keepalive_interval=_ALIVE_S,
                    skip_instance_cache=True,
                    **self._options,
                )
            return self._connected

    def _drop(self, fs: Any) -> None:
        """Others may have made a new connection by now."""
        with self._lock:
            if self._connected is fs:
                self._connected = None


def _send(fs: Any, path: str, parts: Parts) -> None:
    with fs.open(path, "wb") as file:
        for part in parts():
            for start in range(0, len(part), WRITE_BYTES):
                file.write(bytes(part[start : start + WRITE_BYTES]))
        with suppress(asyncssh.SFTPOpUnsupported):
            file.fsync()


def _path(name: str) -> str:
    return f"/{name}"


def _told(error: Exception) -> OSError:
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    text = str(error) or type(error).__name__
    kind = errno.EACCES if isinstance(error, asyncssh.PermissionDenied) else errno.EIO
    return OSError(kind, " ".join(text.split())[:400])

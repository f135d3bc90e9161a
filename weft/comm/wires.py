"""Connections that a library made in this process, for when it offers no way to end them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_INTERNET = (socket.AF_INET, socket.AF_INET6)


class Wires:
    """Those that appeared while ``noted`` ran; on Linux. Elsewhere there are none."""

    def __init__(self) -> None:
        self._made = set[int]()
        self._others: set[int] | None = None
        """Ports at which this process listened before the library did."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """In it the library connects, and accepts."""
        before = set[int]()
        listened = set[int]()
        for each in _sockets():
            before.add(_number(each))
            if _listens(each):
                listened.add(_port(each))
        if self._others is None:
            self._others = listened
        yield
        for each in _sockets():
            is_other = _listens(each) or _port(each) in self._others
            if _number(each) not in before and not is_other:
                self._made.add(_number(each))

    def cut(self) -> None:
        """Whoever waits there, at either end, hears that nobody is there any more."""
        for each in _sockets():
            if _number(each) in self._made:
                with suppress(OSError):  # the other end was faster
                    each.shutdown(socket.SHUT_RDWR)
        self._made.clear()


def _sockets() -> Iterator[socket.socket]:
    """Each as a copy that is good for one turn."""
    folder = Path("/proc/self/fd")
    for entry in list(folder.iterdir()) if folder.exists() else ():
        with suppress(OSError), ExitStack() as stack:  # another thread closed it, or it is none
            if not str(entry.readlink()).startswith("socket:"):
                continue
            found = stack.enter_context(_copy(int(entry.name)))
            if found.family in _INTERNET and found.type == socket.SOCK_STREAM:
                yield found


def _copy(handle: int) -> socket.socket:
    copy = os.dup(handle)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _number(of: socket.socket) -> int:
    """The kernel's, which a copy shares."""
    return os.fstat(of.fileno()).st_ino


def _listens(of: socket.socket) -> bool:
    return bool(of.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _port(of: socket.socket) -> int:
    return int(of.getsockname()[1])

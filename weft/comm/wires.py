"""Connections that a library made in this process, for when it offers no way to end them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_LISTENS = "0A"
"""In the kernel's tables of TCP."""


class _Socket(NamedTuple):
    port: int
    """At this end."""
    listens: bool


class Wires:
    """Those that appeared while ``noted`` ran; on Linux. Elsewhere there are none.

    Nothing but what ``cut`` ends is touched: a copy of a socket, however short, would take its
    timeouts from Python's default.
    """

    def __init__(self) -> None:
        self._made = set[int]()
        """By the kernel's numbers."""
        self._ports = set[int]()
        """At which the library listens."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """In it the library connects, and accepts."""
        before = _sockets()
        yield
        now = _sockets()
        new = {number: each for number, each in now.items() if number not in before}
        self._ports |= {each.port for each in new.values() if each.listens}
        others = {each.port for each in now.values() if each.listens} - self._ports
        self._made |= {
            number
            for number, each in new.items()
            if not each.listens and each.port not in others  # somebody else's server accepted it
        }

    def cut(self) -> None:
        """Whoever waits there, at either end, hears that nobody is there any more."""
        for handle, number in _handles():
            if number in self._made:
                with suppress(OSError):  # the other end was faster
                    _shut(handle)
        self._made.clear()


def _sockets() -> dict[int, _Socket]:
    """Those of TCP that this process has open, by the kernel's numbers."""
    lines: list[str] = []
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            lines += Path("/proc/self/net", name).read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    open_here = {number for _, number in _handles()}
    return {
        int(row[9]): _Socket(int(row[1].rpartition(":")[2], 16), row[3] == _LISTENS)
        for row in rows
        if int(row[9]) in open_here
    }


def _handles() -> Iterator[tuple[int, int]]:
    """Each open socket, and the kernel's number of it, which copies share."""
    folder = Path("/proc/self/fd")
    for entry in list(folder.iterdir()) if folder.exists() else ():
        with suppress(OSError):  # another thread closed it
            kind, _, number = str(entry.readlink()).partition(":[")
            if kind == "socket":
                yield int(entry.name), int(number.rstrip("]"))


def _shut(handle: int) -> None:
    copy = os.dup(handle)
    try:
        with socket.socket(fileno=copy) as found:
            copy = -1
            found.shutdown(socket.SHUT_RDWR)
    finally:
        if copy >= 0:
            os.close(copy)

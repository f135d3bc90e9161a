"""Copies of a machine's state in the memory of another, from agent to agent over TCP.

Both ends of a connection prove that they know the secret of the job, which its ranks tell them;
what is sent is not encrypted. An image is sent as it lies in memory, and compared with its guard.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from weft.checkpoint.agent.image import Image, memory_file, opened_image
from weft.checkpoint.entry import CheckpointError
from weft.comm.proven import QUIET_S, Listener, fill, heard, prove, say

_SHARE = 1 << 22

T = TypeVar("T")
Facts = Mapping[str, Any]
"""What is said of an image: ``name`` of its save, ``rank``, ``guard``, and whatever comes along."""


class Shelf(Protocol):
    """Where images are that others may take, and where theirs are put."""

    def give(self, name: str, rank: int) -> tuple[Image, int] | None:
        """An image and its guard, if it is here."""

    def take(self, facts: Facts, image: Image) -> None:
        """Another machine's image has come whole."""


class PeerServer:
    """Answers to agents and ranks of other machines, in threads of its own."""

    def __init__(self, host: str, secret: str, shelf: Shelf) -> None:
        self._shelf = shelf
        self._served: set[socket.socket] = set()
        self._listener = Listener(host, secret, self._hear)
        self.port = self._listener.port

    def close(self) -> None:
        self._listener.close()

    @property
    def is_busy(self) -> bool:
        """Somebody who knows the secret takes or puts an image."""
        return bool(self._served)

    def _hear(self, end: socket.socket) -> None:
        with end:
            self._served.add(end)
            try:
                self._answer(end)
            finally:
                self._served.discard(end)

    def _answer(self, end: socket.socket) -> None:
        asked = heard(end)
        if asked["do"] == "put":
            self._shelf.take(asked, _received(end, asked))
            say(end, {"is": "here"})
            return
        found = self._shelf.give(asked["name"], asked["rank"])
        if found is None:
            say(end, {"is": "gone"})
            return
        image, guard = found
        say(end, {"is": "here", "name": asked["name"], **_facts(image, guard)})
        _send(end, image)


def put(address: tuple[str, int], secret: str, facts: Facts, image: Image, guard: int) -> None:
    """Give another machine a copy of an image.

    Raises CheckpointError: it cannot be reached, or did not take it.
    """

    def give(end: socket.socket) -> None:
        say(end, {"do": "put", **facts, **_facts(image, guard)})
        _send(end, image)
        heard(end)

    _with(address, secret, give)


def get(address: tuple[str, int], secret: str, name: str, rank: int) -> Image:
    """A copy of an image that another machine has.

    Raises CheckpointError: it cannot be reached, has it no more, or it is not what was copied.
    """

    def take(end: socket.socket) -> Image:
        say(end, {"do": "get", "name": name, "rank": rank})
        answer = heard(end)
        if answer["is"] != "here":
            raise ValueError(f"rank {rank} is there no more")
        return _received(end, answer)

    return _with(address, secret, take)


def _with(address: tuple[str, int], secret: str, talk: Callable[[socket.socket], T]) -> T:
    try:
        with socket.create_connection(address, QUIET_S) as end:
            prove(end, secret.encode(), is_server=False)
            return talk(end)
    except (OSError, ValueError, LookupError) as error:
        place = f"memory of {address[0]}:{address[1]}"
        raise CheckpointError(f"cannot be reached: {error}", file=place) from error


def _facts(image: Image, guard: int) -> dict[str, Any]:
    return {
        "bytes": os.fstat(image.handle).st_size,
        "pieces_bytes": image.pieces_bytes,
        "guard": guard,
    }


def _send(end: socket.socket, image: Image) -> None:
    size, sent = os.fstat(image.handle).st_size, 0
    while sent < size:
        end.sendall(os.pread(image.handle, min(_SHARE, size - sent), sent))
        sent = min(sent + _SHARE, size)


def _received(end: socket.socket, facts: Facts) -> Image:
    size = int(facts["bytes"])
    handle = memory_file()
    try:
        os.ftruncate(handle, size)
        with mmap.mmap(handle, size) as memory, memoryview(memory) as data:
            fill(end, data)
        image = opened_image(handle, int(facts["pieces_bytes"]))
    except BaseException:
        os.close(handle)
        raise
    if image.guard(facts["name"]) != facts["guard"]:
        raise ValueError("it is not what was copied (guard differs)")
    return image

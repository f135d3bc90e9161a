"""Copies of a machine's state in the memory of another, from agent to agent over TCP.

Both ends of a connection prove that they know the secret of the job, which its ranks tell them;
what is sent is not encrypted. An image is sent as it lies in memory, and compared with its guard.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import mmap
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from weft.checkpoint.agent.image import Image, memory_file, opened_image
from weft.checkpoint.entry import CheckpointError

QUIET_S = 60.0
"""A connection on which nothing moves for so long is given up."""
UNPROVEN = 64
"""Connections that have not shown that they know the secret; more of them wait for a place."""
_NONCE = 32
_MOST_WORDS = 1 << 28
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
        self._secret = secret.encode()
        self._shelf = shelf
        self._places = threading.Semaphore(UNPROVEN)
        self._served: set[socket.socket] = set()
        self._listener = socket.create_server((host, 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, name="peers", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):  # wakes the thread that waits for the next one
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @property
    def is_busy(self) -> bool:
        """Somebody who knows the secret takes or puts an image."""
        return bool(self._served)

    def _serve(self) -> None:
        while True:
            self._places.acquire()
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._hear, args=(end,), name="peer", daemon=True).start()

    def _hear(self, end: socket.socket) -> None:
        with end, suppress(OSError, ValueError, LookupError):  # they see that it ends
            try:
                end.settimeout(QUIET_S)
                _prove(end, self._secret, is_server=True)
            finally:
                self._places.release()
            self._served.add(end)
            try:
                self._answer(end)
            finally:
                self._served.discard(end)

    def _answer(self, end: socket.socket) -> None:
        asked = _words(end)
        if asked["do"] == "put":
            self._shelf.take(asked, _received(end, asked))
            _say(end, {"is": "here"})
            return
        found = self._shelf.give(asked["name"], asked["rank"])
        if found is None:
            _say(end, {"is": "gone"})
            return
        image, guard = found
        _say(end, {"is": "here", "name": asked["name"], **_facts(image, guard)})
        _send(end, image)


def put(address: tuple[str, int], secret: str, facts: Facts, image: Image, guard: int) -> None:
    """Give another machine a copy of an image.

    Raises CheckpointError: it cannot be reached, or did not take it.
    """

    def give(end: socket.socket) -> None:
        _say(end, {"do": "put", **facts, **_facts(image, guard)})
        _send(end, image)
        _words(end)

    _with(address, secret, give)


def get(address: tuple[str, int], secret: str, name: str, rank: int) -> Image:
    """A copy of an image that another machine has.

    Raises CheckpointError: it cannot be reached, has it no more, or it is not what was copied.
    """

    def take(end: socket.socket) -> Image:
        _say(end, {"do": "get", "name": name, "rank": rank})
        answer = _words(end)
        if answer["is"] != "here":
            raise ValueError(f"rank {rank} is there no more")
        return _received(end, answer)

    return _with(address, secret, take)


def _with(address: tuple[str, int], secret: str, talk: Callable[[socket.socket], T]) -> T:
    try:
        with socket.create_connection(address, QUIET_S) as end:
            _prove(end, secret.encode(), is_server=False)
            return talk(end)
    except (OSError, ValueError, LookupError) as error:
        place = f"memory of {address[0]}:{address[1]}"
        raise CheckpointError(f"cannot be reached: {error}", file=place) from error


def _prove(end: socket.socket, secret: bytes, *, is_server: bool) -> None:
    """Show that this end knows the secret, and that the other one does; raise ValueError if not.

    The one who connects proves it first, so nobody learns anything of a server.
    """
    until = time.monotonic() + QUIET_S
    mine = secrets.token_bytes(_NONCE)
    end.sendall(mine)
    theirs = bytes(_read(end, _NONCE, until))
    both = theirs + mine if is_server else mine + theirs

    def proof(of: bytes) -> bytes:
        return hmac.digest(secret, of + both, hashlib.sha256)

    if not is_server:
        end.sendall(proof(b"client"))
    other = b"client" if is_server else b"server"
    if not hmac.compare_digest(bytes(_read(end, 32, until)), proof(other)):
        raise ValueError("it is not of this job")
    if is_server:
        end.sendall(proof(b"server"))


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
            _fill(end, data)
        image = opened_image(handle, int(facts["pieces_bytes"]))
    except BaseException:
        os.close(handle)
        raise
    if image.guard(facts["name"]) != facts["guard"]:
        raise ValueError("it is not what was copied (guard differs)")
    return image


def _say(end: socket.socket, words: Mapping[str, Any]) -> None:
    text = json.dumps(words).encode()
    end.sendall(len(text).to_bytes(8, "big") + text)


def _words(end: socket.socket) -> dict[str, Any]:
    size = int.from_bytes(_read(end, 8), "big")
    if size > _MOST_WORDS:
        raise ValueError(f"{size} bytes of words")
    words: dict[str, Any] = json.loads(bytes(_read(end, size)))
    return words


def _read(end: socket.socket, size: int, until: float = math.inf) -> bytearray:
    data = bytearray(size)
    _fill(end, memoryview(data), until)
    return data


def _fill(end: socket.socket, data: memoryview, until: float = math.inf) -> None:
    done = 0
    while done < len(data):
        if time.monotonic() > until:
            raise TimeoutError("it is too slow")
        count = end.recv_into(data[done:])
        if not count:
            raise ConnectionError("it went away")
        done += count

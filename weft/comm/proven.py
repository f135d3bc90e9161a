"""Words between machines of one job: JSON with its length before it, once both ends of a connection
have proved that they know a secret. What is sent is not encrypted."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

QUIET_S = 60.0
"""A connection on which nothing moves for so long is given up."""
UNPROVEN = 64
"""Connections that have not shown that they know the secret; more of them wait for a place."""
LENGTH_BYTES = 8
MOST_BYTES = 1 << 28
_NONCE = 32


class Listener:
    """Waits for those who know the secret, in threads of its own.

    Args:
        host: The address to listen at; empty: all of this machine.
        serve: Has the connection from then on, in a thread of its own. What it raises of a bad
            connection, or of bad words, ends that alone.
    """

    def __init__(self, host: str, secret: str, serve: Callable[[socket.socket], None]) -> None:
        self._secret = secret.encode()
        self._serve = serve
        self._places = threading.Semaphore(UNPROVEN)
        self._listener = server_at(host)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._listen, name="machines", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):  # wakes the thread that waits for the next one
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            self._places.acquire()
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._hear, args=(end,), name="machine", daemon=True).start()

    def _hear(self, end: socket.socket) -> None:
        with suppress(OSError, ValueError, LookupError):  # they see that it ends
            try:
                end.settimeout(QUIET_S)
                prove(end, self._secret, is_server=True)
            except BaseException:
                end.close()
                raise
            finally:
                self._places.release()
            self._serve(end)


def server_at(host: str) -> socket.socket:
    """Listens at a port of an address of this machine; empty: of all that it has."""
    if not host and socket.has_dualstack_ipv6():
        with suppress(OSError):  # the kernel knows IPv6, and is told not to use it
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


def prove(end: socket.socket, secret: bytes, *, is_server: bool) -> None:
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


def framed(words: Mapping[str, Any]) -> bytes:
    """As they are sent."""
    text = json.dumps(words).encode()
    return len(text).to_bytes(LENGTH_BYTES, "big") + text


def length_of(head: bytes) -> int:
    """Of the words behind it. Raises ValueError for what nobody says."""
    size = int.from_bytes(head, "big")
    if size > MOST_BYTES:
        raise ValueError(f"{size} bytes of words")
    return size


def say(end: socket.socket, words: Mapping[str, Any]) -> None:
    """To the other end; raises OSError where that has gone."""
    end.sendall(framed(words))


def heard(end: socket.socket) -> dict[str, Any]:
    """What the other end says next."""
    size = length_of(bytes(_read(end, LENGTH_BYTES)))
    words: dict[str, Any] = json.loads(bytes(_read(end, size)))
    return words


def _read(end: socket.socket, size: int, until: float = math.inf) -> bytearray:
    data = bytearray(size)
    fill(end, memoryview(data), until)
    return data


def fill(end: socket.socket, data: memoryview, until: float = math.inf) -> None:
    """Read all of it. Raises OSError where the other end goes away or is too slow."""
    done = 0
    while done < len(data):
        if time.monotonic() > until:
            raise TimeoutError("it is too slow")
        count = end.recv_into(data[done:])
        if not count:
            raise ConnectionError("it went away")
        done += count

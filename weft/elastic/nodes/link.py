"""The connection between the command of node 0, the head of a job, and that of another machine.

Words go both ways; each end says something now and then, so a silent machine is known to be lost.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from weft.comm.proven import LENGTH_BYTES, framed, length_of

SEND_S = 10.0
"""How long the other end's buffers may be full."""
STILL_S = 5.0
"""Whoever has not listened for so long was busy or stood still, and judges nobody yet."""
_READ = 1 << 16

Words = Mapping[str, Any]


class Link:
    """One end, whose other end has proved that it is of this job.

    Args:
        quiet_s: The other machine is lost when it said nothing for so long; 0: never.
    """

    def __init__(self, end: socket.socket, quiet_s: float) -> None:
        end.settimeout(SEND_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.host = str(end.getpeername()[0])
        self.lost = ""
        """Why there is nobody at the other end any more; empty while there is."""
        self._end = end
        self._quiet_s = quiet_s or math.inf
        self._sends = threading.Lock()
        self._unread = b""
        self._heard_at = self._listened_at = self._came_at = time.monotonic()
        self._over = threading.Event()
        if quiet_s:
            threading.Thread(target=self._beat, args=(quiet_s / 4,), daemon=True).start()

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def is_alive(self) -> bool:
        """The other end said something within two beats; judged by what was ``heard``."""
        return not self.lost and time.monotonic() <= self._came_at + self._quiet_s / 2

    def say(self, **words: Any) -> None:
        """To one who is gone, nothing."""
        try:
            with self._sends:
                if not self.lost:
                    self._end.sendall(framed(words))
        except OSError as error:
            self.drop(f"its connection failed: {error}")

    def heard(self) -> list[Words]:
        """What was said since, without waiting. The last words of one who is gone come first."""
        data, is_open = b"", not self.lost
        try:
            while is_open and wait([self._end], 0):
                more = self._end.recv(_READ)
                data, is_open = data + more, bool(more)
        except OSError as error:
            self.drop(f"its connection failed: {error}")
        words = self._parsed(data)
        if not is_open:
            self.drop("its command has ended")
        self._judge(came=bool(data))
        return words

    def drop(self, why: str) -> None:
        """It is lost; it hears that, if it can."""
        self.lost = self.lost or why
        self._over.set()
        with suppress(OSError):  # wakes whoever waits there
            self._end.shutdown(socket.SHUT_RDWR)
        with self._sends:
            self._end.close()

    def _parsed(self, data: bytes) -> list[Words]:
        found, text = list[Words](), self._unread + data
        try:
            while len(text) >= LENGTH_BYTES:
                until = LENGTH_BYTES + length_of(text[:LENGTH_BYTES])
                if len(text) < until:
                    break
                words = json.loads(text[LENGTH_BYTES:until])
                found += [words] if words else []
                text = text[until:]
        except ValueError as error:
            self.drop(f"its words cannot be read: {error}")
        self._unread = text
        return found

    def _judge(self, *, came: bool) -> None:
        now = time.monotonic()
        stood_still, self._listened_at = now > self._listened_at + STILL_S, now
        self._came_at = now if came else self._came_at
        if came or stood_still:
            self._heard_at = now
        elif now > self._heard_at + self._quiet_s:
            self.drop(f"it said nothing for {self._quiet_s:g} s (recovery.heartbeat_s)")

    def _beat(self, every_s: float) -> None:
        while not self._over.wait(every_s):
            with suppress(OSError), self._sends:  # the other thread sees that it is gone
                self._end.sendall(framed({}))

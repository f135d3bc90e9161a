"""Links on which everything arrives later: a program that carries frames between the two ends.

    python weft/lab/relay.py '[[0.05, ["NAMESPACE", "PORT"], ["NAMESPACE", "PORT"]], ...]'

Each end is a port (TAP) in a network namespace: what the kernel sends there is read here, kept for
so many seconds, and handed to the other end. Rates are the kernel's, at the ports. Frames come as
the kernel has them, with sums and cuts into packets still to be made (``IFF_VNET_HDR``), so that
few are read on fast links. It needs nothing but Python and prints a line once all ports are there.
They go away with it, and it goes away with the process that started it.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

READY = "ready"
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP_WITHOUT_PROTOCOL_WITH_OFFERS = 0x0002 | 0x1000 | 0x4000
"""``IFF_TAP | IFF_NO_PI | IFF_VNET_HDR``."""
_CAN_TAKE = 0x01 | 0x02 | 0x04
"""``TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6``."""
_LARGEST = 70000
"""Bytes of a frame, with what goes before it."""
_AT_ONCE = 16
"""Frames that are read from a port before others are looked at."""


class _Way:
    """One direction of a link."""

    def __init__(self, late_s: float, come: int, leave: int) -> None:
        self.come = come
        self._late_s, self._leave = late_s, leave
        self._waiting: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Read what has come."""
        with suppress(BlockingIOError):
            for _ in range(_AT_ONCE):
                frame = os.read(self.come, _LARGEST)
                self._waiting.append((time.monotonic() + self._late_s, frame))

    def hand_on(self, now_s: float) -> float:
        """Write what is due; when the next frame will be."""
        while self._waiting and self._waiting[0][0] <= now_s:
            _, frame = self._waiting.popleft()
            with suppress(OSError):  # as a port that is down loses it
                os.write(self._leave, frame)
        return self._waiting[0][0] if self._waiting else float("inf")


def main(links: Sequence[tuple[float, tuple[str, str], tuple[str, str]]]) -> None:
    """Make the ports and carry frames until the process is ended."""
    _end_with_parent()
    ways = []
    for late_s, one, other in links:
        here, there = _port(*one), _port(*other)
        ways += [_Way(late_s, here, there), _Way(late_s, there, here)]
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    with suppress(OSError):  # nobody who is not root may be first, nor has to be
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    by_port = {way.come: way for way in ways}
    while True:
        due_s = min(way.hand_on(time.monotonic()) for way in ways)
        wait_s = None if due_s == float("inf") else max(0.0, due_s - time.monotonic())
        for port in select.select(by_port, (), (), wait_s)[0]:
            by_port[port].take()


def _port(namespace: str, name: str) -> int:
    """A port in a namespace, down and with no address; it is there while this process is."""
    _enter(namespace)
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    asked = struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_PROTOCOL_WITH_OFFERS)
    fcntl.ioctl(handle, _TUNSETIFF, asked)
    fcntl.ioctl(handle, _TUNSETOFFLOAD, _CAN_TAKE)
    return handle


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    network = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(network, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(network)


def _end_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

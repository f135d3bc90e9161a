"""Stop after the current step when asked to: Ctrl-C, or SIGTERM or SIGUSR1 from a job system."""

from __future__ import annotations

import functools
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType

SAME_REQUEST_S = 1.0
"""Signals that come together are one request to stop: job systems send them to a process and to
its group, a terminal to everything that runs in it."""


class StopSignal:
    """Remembers that this process was asked to stop. The ranks agree on it with their totals.

    A second Ctrl-C, more than a second later, interrupts at once. SIGTERM never does: the command
    that started this rank sends it for a signal that may have reached this process too.
    """

    def __init__(self) -> None:
        self.asked = False
        self._interrupted = math.inf

    def listen(self) -> None:
        """Take over Ctrl-C, SIGTERM and SIGUSR1, which job systems send before a time limit."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.asked = True
        if number == signal.SIGINT:
            now = time.monotonic()
            self._interrupted = min(self._interrupted, now)
            if now - self._interrupted > SAME_REQUEST_S:
                raise KeyboardInterrupt


@functools.cache
def own_stop() -> StopSignal:
    """Of this process, for all epochs that it is a rank of: what asks it between them counts."""
    return StopSignal()


@contextmanager
def signals_held() -> Iterator[None]:
    """Start helper processes that what asks every process of a job to stop does not end.

    They inherit that it is held back; here it is only late.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    resource_tracker.ensure_running()  # lets the others through when it starts one
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

"""Stop after the current step when asked to: by Ctrl-C, a closed terminal or a job system."""

from __future__ import annotations

import functools
import math
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType

SAME_REQUEST_S = 1.0
"""Signals that come together are one request to stop: job systems send them to a process and to
its group, a terminal to everything that runs in it."""
_OUTPUTS = (1, 2)
"""Standard output and standard error."""


def hang_up() -> tuple[signal.Signals, ...]:
    """What a terminal that is closed sends, unless nobody should care (``nohup``)."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return () if is_ignored else (signal.SIGHUP,)


def let_go_of_terminal() -> None:
    """Where it is gone, what is printed goes nowhere: to write there would fail."""
    outputs = select.poll()
    for output in _OUTPUTS:
        outputs.register(output, 0)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output, found in outputs.poll(0):
        if found & select.POLLHUP:
            os.dup2(nowhere, output)
    os.close(nowhere)


class StopSignal:
    """Remembers that this process was asked to stop. The ranks agree on it with their totals.

    A second Ctrl-C, more than a second later, interrupts at once. SIGTERM never does: the command
    that started this rank sends it for a signal that may have reached this process too.
    """

    def __init__(self) -> None:
        self.asked = False
        self.ends_at_once = False
        """No other rank is there yet to agree with: whatever asks this process interrupts it."""
        self._interrupted = math.inf

    def listen(self) -> None:
        """Take over Ctrl-C, SIGTERM, SIGHUP and SIGUSR1, which job systems send before a limit."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *hang_up()):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        let_go_of_terminal()
        is_first, self.asked = not self.asked, True
        if is_first and self.ends_at_once:
            raise KeyboardInterrupt
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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGHUP})
    resource_tracker.ensure_running()  # lets the others through when it starts one
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

"""Stop after the current step when asked to: Ctrl-C, or SIGTERM from a job system."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType


class StopSignal:
    """Remembers that this process was asked to stop. The ranks agree on it with their totals.

    A second Ctrl-C interrupts at once. SIGTERM never does: the command that started this rank
    sends it for a Ctrl-C that the terminal may have sent to this process too.
    """

    def __init__(self) -> None:
        self.asked = False
        self._interrupts = 0

    def listen(self) -> None:
        """Take over Ctrl-C and SIGTERM in this process."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.asked = True
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Start helper processes that a Ctrl-C, which a terminal sends to every process, does not end.

    They inherit that SIGINT is held back; here it is only late.
    """
    resource_tracker.ensure_running()  # lets SIGINT through when it starts one
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

"""Stop after the current step when asked to: Ctrl-C, or SIGTERM from a job system."""

from __future__ import annotations

import signal
from types import FrameType


class StopSignal:
    """Remembers that this process was asked to stop. The ranks agree on it with their totals.

    A second Ctrl-C interrupts at once.
    """

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        """Take over Ctrl-C and SIGTERM in this process."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

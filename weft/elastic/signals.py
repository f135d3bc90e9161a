"""What Ctrl-C and SIGTERM do to a command, for as long as a part of it runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any


class Handlers:
    """A context manager: puts signal handlers in place. Nothing outside the main thread."""

    def __init__(self, handlers: Mapping[signal.Signals, Any]) -> None:
        self._wanted = handlers
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, what) for n, what in self._wanted.items()}

    def __exit__(self, *_: object) -> None:
        for number, what in self._before.items():
            signal.signal(number, what)


class Asked:
    """Counts how often this process was asked to stop."""

    def __init__(self) -> None:
        self.times = 0

    def handlers(self, *more: signal.Signals) -> Handlers:
        """Count Ctrl-C, SIGTERM and these instead of ending."""
        return Handlers(dict.fromkeys((signal.SIGINT, signal.SIGTERM, *more), self._on_signal))

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.times += 1


def sigterm_interrupts() -> Handlers:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does, so that what was begun is cleaned up."""
    return Handlers({signal.SIGTERM: signal.default_int_handler})

"""What Ctrl-C, SIGTERM and SIGHUP do to a command, for as long as a part of it runs."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from weft.train.stop import SAME_REQUEST_S, hang_up, let_go_of_terminal


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
    """Counts how often this process was asked to stop; signals within a second are one request."""

    def __init__(self) -> None:
        self.times = 0
        self._counted = -math.inf

    def handlers(self) -> Handlers:
        """Count Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal instead of ending."""
        asking = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *hang_up())
        return Handlers(dict.fromkeys(asking, self._on_signal))

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        let_go_of_terminal()
        now = time.monotonic()
        if now - self._counted > SAME_REQUEST_S:
            self.times += 1
            self._counted = now


class _Interrupting(Asked):
    """Raises where another counts."""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before = self.times
        super()._on_signal(number, frame)
        if self.times > before:
            raise KeyboardInterrupt


def interrupted_once() -> Handlers:
    """Ctrl-C, SIGTERM and a closed terminal raise KeyboardInterrupt, so that what was begun is
    cleaned up; not a second time within a second, which would end the cleaning."""
    return _Interrupting().handlers()

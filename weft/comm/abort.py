"""Ends one epoch of this process from another thread, for whoever knows that a rank was lost.

What waits at a store looks here now and then; what waits in a library is aborted, where it can be.
Gloo's calls cannot: they end by themselves as soon as the lost process is gone, and as their
connections are cut between machines, of which a lost one is only silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from weft.comm.errors import CommError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ENDED = "this epoch was ended, because another rank was lost"
LOOKS_S = (0.0005, 0.02)
"""From one look at a store to the next: at first, and at most."""


class Abort:
    """One object an epoch: asked once, by any thread."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._lock = threading.Lock()
        self._undo: list[Callable[[], None]] = []
        self.wanted = False
        """The ranks are to leave between two steps, for another plan."""
        self.left = False
        """They have."""

    @property
    def asked(self) -> bool:
        """The epoch is over."""
        return self._asked.is_set()

    def ask(self) -> None:
        """End the epoch: what waits in it fails."""
        with self._lock:
            self._asked.set()
            undo, self._undo = self._undo, []
        for each in undo:
            each()

    def then(self, undo: Callable[[], None]) -> None:
        """Call this when the epoch is to end, or at once where it is over."""
        with self._lock:
            if not self.asked:
                self._undo.append(undo)
                return
        undo()

    def wait(
        self,
        store: Store,
        keys: Sequence[str],
        timeout_s: float,
        looks_s: tuple[float, float] = LOOKS_S,
    ) -> bool:
        """Whether somebody wrote each of the keys in time. Signals are seen meanwhile.

        Raises:
            CommError: the epoch was ended.
        """
        deadline = time.monotonic() + timeout_s
        look_s, longest_s = looks_s
        while not store.check(list(keys)):
            look_s = min(2 * look_s, longest_s)
            if self._asked.wait(look_s):
                raise CommError(ENDED)
            if time.monotonic() > deadline:
                return False
        return True

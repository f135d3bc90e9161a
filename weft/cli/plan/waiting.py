"""A long search on a terminal: lines that say how far it is, and Ctrl-C for the best so far."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from time import monotonic
from types import FrameType

from weft.cli.output import err
from weft.elastic.signals import Asked
from weft.planner.search import Watch

SECONDS_BETWEEN_LINES = 2.0


@contextmanager
def watched(minutes: float | None) -> Iterator[Watch]:
    """A watch over searches of so many minutes at most. The first Ctrl-C or SIGTERM ends them as
    soon as something fits; with nothing to show yet, and a second time, it ends the command."""
    waiting = _Waiting(inf if minutes is None else 60 * minutes)
    with waiting.handlers():
        yield waiting.watch


def telling() -> Watch:
    """A watch over a search that says now and then how far it is."""
    return Watch(_Lines().tell)


class _Lines:
    def __init__(self) -> None:
        self._said, self._done, self._since = monotonic(), -1, 0.0
        """When it said something last, of how many candidates, and since when of so many."""

    def tell(self, done: int, best_s: float) -> None:
        """In a line, if the last was long ago."""
        now = monotonic()
        if done != self._done:
            self._done, self._since = done, now
        if now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            best = f", the best takes {best_s:.3g} s a step" if best_s < inf else ""
            words = f"searching: {done:,} candidates done{best}"
            if now - self._since > SECONDS_BETWEEN_LINES:
                words = f"refining the best of what was found, for {now - self._since:.0f} s"
            err.print(words, style="dim")


class _Waiting(Asked):
    """Says how far a long search is; ends it first, and then the command."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.watch = Watch(self.tell, seconds=seconds)
        self._lines, self._said_ending = _Lines(), False

    def tell(self, done: int, best_s: float) -> None:
        """Not by the handler, which may interrupt a line."""
        if self.times and not self._said_ending:
            self._said_ending = True
            err.print("ending the search with the best so far; Ctrl-C again leaves without it")
        self._lines.tell(done, best_s)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before = self.times
        super()._on_signal(number, frame)
        if self.times == before:
            return
        if self.times > 1 or self.watch.best_s == inf:
            raise KeyboardInterrupt
        self.watch.stop()

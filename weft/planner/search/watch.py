"""Whoever waits for a search: is told how far it is, and may have waited long enough."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic

Tell = Callable[[int, float], None]
"""Told often how many candidates are done, and the best step so far, in seconds."""


class Watch:
    """Of one search, or of several for one question."""

    def __init__(self, tell: Tell | None = None, *, seconds: float = inf) -> None:
        """``seconds``: from now on, after which it was long enough."""
        self.best_s = inf
        """The best step that was told."""
        self._tell, self._end = tell, monotonic() + seconds

    def tell(self, done: int, best_s: float) -> None:
        """So many candidates are done, and the best so far takes that long."""
        self.best_s = min(self.best_s, best_s)
        if self._tell is not None:
            self._tell(done, best_s)

    def aside(self) -> Watch:
        """Over a search for something else beside it: ends with this one, whose best stays."""
        return _Aside(self)

    def within(self, seconds: float) -> Watch:
        """It, with so many more seconds at most."""
        self._end = min(self._end, monotonic() + seconds)
        return self

    def stop(self) -> None:
        """It was long enough: nothing more is looked at where something fits."""
        self._end = -inf

    @property
    def is_over(self) -> bool:
        """It was long enough."""
        return monotonic() > self._end


class _Aside(Watch):
    def __init__(self, whole: Watch) -> None:
        super().__init__(lambda done, _: whole.tell(done, whole.best_s))
        self._whole = whole

    @property
    def is_over(self) -> bool:
        return self._whole.is_over

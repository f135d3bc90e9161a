"""Save by time: the clock of one rank says when, and asks the others with the totals of a step."""

from __future__ import annotations

from time import monotonic


class SaveClock:
    """Counts from its start and from every save; ``minutes`` 0 never asks for one."""

    def __init__(self, minutes: float = 0.0) -> None:
        self._wait_s = 60 * minutes
        self.restart()

    @property
    def is_due(self) -> bool:
        """A checkpoint is to be saved."""
        return 0 < self._wait_s <= monotonic() - self._since

    def restart(self) -> None:
        """Something was saved, for whatever reason."""
        self._since = monotonic()

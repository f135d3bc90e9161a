"""What of that which is kept elsewhere is on the device at a time: so many, the last ones used.

Layers compute in one order forward and in the other backward, so that those which computed last
come again first: to keep the last ones is as good as to know the order (Belady), as long as what
comes next is brought ahead.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


class Guest(Protocol):
    """What comes to the device, and goes: the same values in either place."""

    @property
    def is_here(self) -> bool:
        """Nobody has to wait for it."""

    @property
    def is_coming(self) -> bool:
        """It is on its way."""

    def start(self) -> None:
        """Begin to come, unless it is here."""

    def wait(self) -> None:
        """Return when it is here."""

    def free(self) -> None:
        """Go."""


@dataclass(slots=True)
class Visits:
    """How often something was used, by where it was then."""

    here: int = 0
    """On the device, since it was used before."""
    ahead: int = 0
    """On its way, because it was expected."""
    late: int = 0
    """Neither: it began to come only then."""
    waited_s: float = 0.0
    """Until what was used was there."""


class Residents:
    """Those that are on the device.

    Args:
        most: Sets of them, each used at a time; 2 at least: one computes, the next one comes.
    """

    def __init__(self, most: int) -> None:
        assert most >= 2, f"{most}: one computes while the next one comes"
        self._most = most
        self._here: dict[tuple[Guest, ...], None] = {}
        """In the order in which they were used."""
        self.visits = Visits()

    def use(self, guests: Sequence[Guest], soon: Sequence[Guest]) -> None:
        """Have those that compute now, begin to bring the next ones, and let go of the ones that
        were used longest ago."""
        now, coming = tuple(guests), tuple(soon)
        if now:
            self._count(now)
            began = time.perf_counter()
            for guest in now:
                guest.wait()
            self.visits.waited_s += time.perf_counter() - began
            self._here.pop(now, None)
            self._here[now] = None
        if coming:
            self._here.setdefault(coming)
        self._leave({now, coming})
        for guest in coming:
            guest.start()

    def told(self) -> Visits:
        """Since this was last asked."""
        told, self.visits = self.visits, Visits()
        return told

    def _count(self, now: Collection[Guest]) -> None:
        if all(guest.is_here for guest in now):
            self.visits.here += 1
        elif any(guest.is_here or guest.is_coming for guest in now):
            self.visits.ahead += 1
        else:
            self.visits.late += 1

    def _leave(self, wanted: set[tuple[Guest, ...]]) -> None:
        for guests in list(self._here):
            if guests in wanted:
                continue
            is_gone = not any(guest.is_here or guest.is_coming for guest in guests)
            if is_gone or len(self._here) > self._most:
                del self._here[guests]
                for guest in guests:
                    guest.free()

"""How agents of several machines know of one another that a save is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from weft.checkpoint.draft import Draft
from weft.checkpoint.entry import CheckpointError

BEAT_S = 5.0
"""From one word of an agent that holds copies to the next; each is a small file."""
LOOK_S = 1.0
"""How often it looks whether the save has been begun."""
GIVEN_UP_S = 10.0
"""How long a save waits for other machines once other ranks have taken the places of those who
began it: whoever was lost there may never have copied, and nobody there would know of it."""
SILENT_S = 60.0
"""How long it then waits for one that was seen at work."""


class Holding:
    """Says in a draft, again and again, that all ranks of this machine have copied.

    Args:
        draft: Makes it, which may take as long as storage far away does.
        rank: One of them, the first that whoever commits waits for.
    """

    def __init__(self, draft: Callable[[], Draft], rank: int) -> None:
        self._draft, self._rank = draft, rank
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._speak, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Nothing is said any more when it returns."""
        self._over.set()
        self._thread.join()

    def _speak(self) -> None:
        draft, beat, wait_s = self._draft(), 0, 0.0
        while not self._over.wait(wait_s):
            wait_s = LOOK_S
            with suppress(
                CheckpointError, OSError
            ):  # whoever writes the files says what is wrong there
                if draft.is_open():
                    draft.hold(self._rank, beat)
                    beat, wait_s = beat + 1, BEAT_S


class Patience:
    """With one that is waited for, since ranks that took the places of others go on without it.

    Args:
        is_at_work: It was seen to be, since this was asked last.
    """

    def __init__(self, is_at_work: Callable[[], bool]) -> None:
        self._is_at_work = is_at_work
        self._seen_at, self._lasts_s = time.monotonic(), GIVEN_UP_S

    def has_ended(self, since: float) -> bool:
        """``since``: when those ranks came. Asked again and again."""
        if self._is_at_work():
            self._seen_at, self._lasts_s = time.monotonic(), SILENT_S
        return time.monotonic() > max(since, self._seen_at) + self._lasts_s


def speaks(draft: Draft, rank: int) -> Callable[[], bool]:
    """Whether the agent of that rank has said something new in a draft."""
    heard: int | None = None

    def is_new() -> bool:
        nonlocal heard
        before, heard = heard, draft.held(rank)
        return heard not in (None, before)

    return is_new

"""Whoever hears how far a search is, and has enough once a step is short enough."""

from __future__ import annotations

from weft.planner.search import Watch


class Told(Watch):
    """Keeps what it is told; ends with the first step that is at most so long: then a test that
    asks for no more knows enough, and goes red as late as ever."""

    def __init__(self, until_s: float = 0.0) -> None:
        super().__init__(self.hear)
        self.until_s, self.heard = until_s, list[tuple[int, float]]()

    def hear(self, done: int, best_s: float) -> None:
        self.heard.append((done, best_s))
        if best_s <= self.until_s:
            self.stop()

"""What comes out of a play: every action's start and end, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.schedules.action import Action

_FREES = ("B", "W")


@dataclass(frozen=True, slots=True)
class Span:
    """One action and its time, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of a pipeline."""

    spans: tuple[tuple[Span, ...], ...]
    """For every position, what it does, in order."""

    @property
    def step_s(self) -> float:
        """Until the last action of all has ended."""
        return max((row[-1].end_s for row in self.spans if row), default=0.0)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """How long each position computes."""
        return tuple(sum(span.end_s - span.start_s for span in row) for row in self.spans)

    @property
    def bubble(self) -> float:
        """Part of the positions' time in which they idle."""
        whole = self.step_s * len(self.spans)
        return 1 - sum(self.busy_s) / whole if whole else 0.0

    def held(self, kept: Sequence[float] | None = None) -> tuple[float, ...]:
        """The most that each position holds at once, from a forward to the end of its backward.

        ``kept``: what each stage keeps for one microbatch, in any unit; without it, counts.
        """
        return tuple(_most(row, kept) for row in self.spans)


def _most(row: Sequence[Span], kept: Sequence[float] | None) -> float:
    now = most = 0.0
    for span in row:
        size = 1.0 if kept is None else kept[span.action.stage]
        if span.action.kind == "F":
            now += size
        elif span.action.kind in _FREES:
            now -= size
        most = max(most, now)
    return most

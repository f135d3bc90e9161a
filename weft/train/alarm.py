"""Whether something takes longer than it should, said once: alarms, and what ranks are held to."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from statistics import median
from typing import Literal

from weft.plan.plan import Plan

PATIENCE = 3
"""So many looks in a row raise an alarm, and so many end it."""


class Alarm:
    """Raised where a ratio stays above a limit, and over once it stays well below it.

    Args:
        limit: Above 1. Over is what is nearer to 1 than to the limit.
    """

    def __init__(self, limit: float) -> None:
        self.is_raised = False
        self._limit, self._over = limit, (1 + limit) / 2
        self._in_a_row = 0

    def look(self, ratio: float) -> Literal["raised", "over", ""]:
        """What this look changes."""
        is_turning = ratio < self._over if self.is_raised else ratio > self._limit
        self._in_a_row = self._in_a_row + 1 if is_turning else 0
        if self._in_a_row < PATIENCE:
            return ""
        self._in_a_row, self.is_raised = 0, not self.is_raised
        return "raised" if self.is_raised else "over"


class Paces:
    """How many times as long as predicted ranks are at work, told where that is new: apart from
    what was told before, or from the prediction, by more than a limit, for as long as an alarm
    needs. So what was told once is not told again, and what is over is told once."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._told: Sequence[float] = ()
        self._looks: list[Sequence[float]] = []

    def look(self, paces: Sequence[float]) -> Sequence[float]:
        """What is new, by rank; else nothing."""
        self._looks = [*self._looks, paces] if self._is_new(paces) else []
        if len(self._looks) < PATIENCE:
            return ()
        found = tuple(median(each) for each in zip(*self._looks, strict=True))
        del self._looks[0]
        if not self._is_new(found):  # each look saw another rank
            return ()
        self._told, self._looks = found, []
        return found

    def _is_new(self, paces: Sequence[float]) -> bool:
        if not paces or min(paces) <= 0:
            return False
        before = self._told or [1.0] * len(paces)
        changes = [now / then for now, then in zip(paces, before, strict=True)]
        return max(changes) > self._limit * min(changes)


def equals(plan: Plan) -> list[Hashable]:
    """For each rank what it computes in a step: the same for ranks that have the same work."""
    found: list[Hashable] = []
    for rank in range(plan.world_size):
        mine = plan.rank_plan(rank)
        stages = [mine.pipeline_plan.stages[number] for number in mine.stages]
        work = tuple((s.layers, s.device, s.precision, s.recompute, s.mesh.axes) for s in stages)
        meshes = [s.mesh for s in stages]
        parts = [(m.unlike, *(w[m.coordinate(rank)[a]] for a, w in m.unlike)) for m in meshes]
        kept = [s.state_shares and s.state_shares[s.mesh.ranks.index(rank)] for s in stages]
        samples = sum(map(len, mine.microbatches()))
        found.append((work, samples, tuple(parts), tuple(kept)))
    return found


def slowness(
    busy_s: Sequence[float], work: Sequence[Hashable], predicted_s: Sequence[float] = ()
) -> list[float | None]:
    """How many times as long as it should each rank is at work; None where nothing is known.

    A rank with equals is held to their median. One without is held to what was predicted of it,
    as far as the others keep to that: where all take twice as long, none is slow.

    Args:
        busy_s: By rank, in a step, without waiting for others.
        work: As ``equals`` has it.
        predicted_s: The same before the run; empty: not known.
    """
    ranks: dict[Hashable, list[int]] = {}
    for rank, kind in enumerate(work):
        ranks.setdefault(kind, []).append(rank)
    kept: list[float] = []
    if predicted_s and min(predicted_s) > 0:
        kept = [took / expected for took, expected in zip(busy_s, predicted_s, strict=True)]
    found: list[float | None] = []
    for rank, kind in enumerate(work):
        has_equals = len(ranks[kind]) > 1
        values = busy_s if has_equals else kept
        among = ranks[kind] if has_equals else range(len(values))
        found.append(_against((values[each] for each in among), values[rank]) if values else None)
    return found


def _against(values: Iterable[float], mine: float) -> float | None:
    """By the median; of two, which has no middle, by the other one."""
    all_of_them = sorted(values)
    if len(all_of_them) == 2:
        all_of_them.remove(mine)
    middle = median(all_of_them) if all_of_them else 0.0
    return mine / middle if middle > 0 else None

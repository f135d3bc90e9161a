"""Make a schedule by playing it: every position does, at each moment, what its policy likes best.

A list that comes out of a play cannot deadlock: each action was begun when everything it needs had
ended. Policies differ in the order of their wishes and in how many activations they let live.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from weft.schedules.action import Action, Key, Kind, Waits, waits

Wishes = Callable[["Position"], Iterable[Action]]
"""What a position would like to do next, best first. Actions that cannot begin are passed over."""


TICKS: Mapping[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""How long each kind takes, in any unit; sets only who is ready when. Backward takes twice the
forward, in equal halves: matrix products alone."""


@dataclass(slots=True)
class Position:
    """One position of the pipeline during a play."""

    number: int
    stages: tuple[int, ...]
    """Stages it holds, in model order."""
    num_microbatches: int
    done: list[Action] = field(default_factory=list)
    counts: defaultdict[tuple[Kind, int], int] = field(default_factory=lambda: defaultdict(int))
    """Actions done, by kind and stage. Each kind takes the microbatches of a stage in order."""
    totals: defaultdict[Kind, int] = field(default_factory=lambda: defaultdict(int))

    def next(self, kind: Kind, stage: int) -> list[Action]:
        """The next action of this kind on a stage, or none when all are done."""
        microbatch = self.counts[kind, stage]
        return [Action(kind, stage, microbatch)] if microbatch < self.num_microbatches else []

    def add(self, action: Action) -> None:
        kind, stage, _ = action
        self.done.append(action)
        self.counts[kind, stage] += 1
        self.totals[kind] += 1


def play(
    stages_of: Sequence[tuple[int, ...]],
    num_microbatches: int,
    wishes: Wishes,
    *,
    split: bool,
    heads: int = 0,
) -> list[list[Action]]:
    """The lists that come out when every position follows ``wishes``.

    Args:
        stages_of: The stages of each position.
        split: Backward comes in halves.
        heads: As ``awaited`` has it.
    """
    positions = [Position(p, held, num_microbatches) for p, held in enumerate(stages_of)]
    num_stages = sum(len(held) for held in stages_of)
    needs = waits(num_stages, split=split, heads=heads)
    ended: dict[Key, int] = {}
    free_at = [0] * len(positions)
    moments = [0]
    total = num_stages * num_microbatches * (3 if split else 2)
    while len(ended) < total:
        assert moments, f"nothing can begin after {len(ended)} of {total} actions"
        now = heapq.heappop(moments)
        while moments and moments[0] == now:
            heapq.heappop(moments)
        for position in positions:
            if free_at[position.number] > now:
                continue
            action = _first_ready(wishes(position), ended, now, needs)
            if action is not None:
                position.add(action)
                ended[action] = free_at[position.number] = now + TICKS[action.kind]
                heapq.heappush(moments, ended[action])
    return [position.done for position in positions]


def _first_ready(
    wished: Iterable[Action], ended: dict[Key, int], now: int, needs: Waits
) -> Action | None:
    later = now + 1
    for action in wished:
        kind, stage, microbatch = action
        for of, at, before in needs(kind, stage):
            if before <= microbatch and ended.get((of, at, microbatch - before), later) > now:
                break
        else:
            return action
    return None

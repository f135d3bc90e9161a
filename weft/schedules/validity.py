"""Prove that a schedule ends and does everything once; without a device."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import product

from weft.schedules.action import Action, Key, Kind, Schedule, Waits, waits


def prove(
    schedule: Schedule,
    stages_of: Sequence[Sequence[int]],
    num_microbatches: int,
    *,
    heads: int = 0,
) -> tuple[Action, ...]:
    """Check a schedule from any source. One order in which its actions can be done one by one.

    ``heads``: as ``awaited`` has it.

    Raises:
        ValueError: an action is missing, comes twice, sits at the wrong position, or waits for
            something that can never come.
    """
    split = any(action.kind in "IW" for actions in schedule for action in actions)
    kinds: tuple[Kind, ...] = ("F", "I", "W") if split else ("F", "B")
    for number, (actions, held) in enumerate(zip(schedule, stages_of, strict=True)):
        _check_once(number, actions, set(product(kinds, held, range(num_microbatches))))
    return in_order(schedule, heads=heads)


def _check_once(number: int, actions: Sequence[Action], wanted: set[Key]) -> None:
    there: set[Key] = set(actions)
    if there == wanted and len(there) == len(actions):
        return
    twice = [action for action, count in Counter(actions).items() if count > 1]
    wrong = sorted(wanted ^ there) or twice
    raise ValueError(f"position {number}: {Action(*wrong[0])} is not done exactly once")


def in_order(schedule: Schedule, *, heads: int = 0) -> tuple[Action, ...]:
    """One order in which its actions can be done: whatever can be done, until all is done.

    Raises:
        ValueError: an action waits for something that can never come.
    """
    num_stages = 1 + max(action.stage for actions in schedule for action in actions)
    split = any(action.kind == "I" for actions in schedule for action in actions)
    waiting = _Waiting(waits(num_stages, split=split, heads=heads))
    done: list[Action] = []
    at = [0] * len(schedule)
    before = -1
    while before < len(done):
        before = len(done)
        for number, actions in enumerate(schedule):
            at[number] = waiting.advance(actions, at[number], done)
    stuck = [(n, a[at[n]]) for n, a in enumerate(schedule) if at[n] < len(a)]
    if stuck:
        words = "; ".join(f"position {number} at {action}" for number, action in stuck)
        raise ValueError(f"the schedule never ends: {words}")
    return tuple(done)


class _Waiting:
    """What is done, and what waits for it."""

    def __init__(self, needs: Waits) -> None:
        # What the first microbatch would await of one before it is done.
        self._done: dict[tuple[Kind, int], set[int]] = defaultdict(lambda: {-1})
        self._needs = cache(lambda *key: [(self._done[k, s], n) for k, s, n in needs(*key)])

    def advance(self, actions: Sequence[Action], at: int, done: list[Action]) -> int:
        """Do the actions of one position until one has to wait; where that is."""
        while at < len(actions):
            kind, stage, microbatch = actions[at]
            for others, before in self._needs(kind, stage):
                if microbatch - before not in others:
                    return at
            self._done[kind, stage].add(microbatch)
            done.append(actions[at])
            at += 1
        return at

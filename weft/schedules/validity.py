"""Prove that a schedule ends, does everything once, and how much it holds; without a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from weft.schedules.action import Action, Schedule, needs


@dataclass(frozen=True, slots=True)
class Proof:
    """Facts of a valid schedule."""

    held: tuple[int, ...]
    """Most forward results that each position keeps at once, over all its stages."""
    order: tuple[Action, ...]
    """One order in which all actions can be done one after the other."""


def prove(schedule: Schedule, stages_of: Sequence[Sequence[int]], num_microbatches: int) -> Proof:
    """Check a schedule from any source.

    Raises:
        ValueError: an action is missing, comes twice, sits at the wrong position, or waits for
            something that can never come.
    """
    num_stages = sum(len(held) for held in stages_of)
    split = any(action.kind in "IW" for actions in schedule for action in actions)
    kinds = "FIW" if split else "FB"
    for number, (actions, held) in enumerate(zip(schedule, stages_of, strict=True)):
        expected = {(k, s, m) for k in kinds for s in held for m in range(num_microbatches)}
        found = Counter(tuple(action) for action in actions)
        wrong = sorted(expected ^ set(found)) or sorted(a for a, n in found.items() if n > 1)
        if wrong:
            raise ValueError(f"position {number}: {Action(*wrong[0])} is not done exactly once")
    return Proof(_held(schedule), _in_order(schedule, num_stages, split=split))


def _held(schedule: Schedule) -> tuple[int, ...]:
    most = []
    for actions in schedule:
        now = peak = 0
        for action in actions:
            now += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
            peak = max(peak, now)
        most.append(peak)
    return tuple(most)


def _in_order(schedule: Schedule, num_stages: int, *, split: bool) -> tuple[Action, ...]:
    """Do whatever can be done until all is done."""
    done: dict[Action, None] = {}
    at = [0] * len(schedule)
    moved = True
    while moved:
        moved = False
        for number, actions in enumerate(schedule):
            while at[number] < len(actions):
                action = actions[at[number]]
                if any(n.action not in done for n in needs(action, num_stages, split=split)):
                    break
                done[action] = None
                at[number] += 1
                moved = True
    stuck = [(n, a[at[n]]) for n, a in enumerate(schedule) if at[n] < len(a)]
    if stuck:
        waits = "; ".join(f"position {number} at {action}" for number, action in stuck)
        raise ValueError(f"the schedule never ends: {waits}")
    return tuple(done)

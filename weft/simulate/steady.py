"""How much longer a long step takes with each microbatch more, seen in a shorter one.

Once it is full, a pipeline repeats itself, though not after each microbatch: where a border is
slow, after as many as are on their way together. Over whole rounds of that it grows evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from weft.schedules.known import Pattern
from weft.simulate.tape import tape_of

_SAME = 1e-9
"""Relative; rounds that differ by less are alike."""


def seconds_each(pattern: Pattern, ended: Sequence[float]) -> float:
    """Of a microbatch more, under 1F1B or ZB-H1.

    Args:
        pattern: At least ``FULL_AFTER`` microbatches for each position.
        ended: When each action of its tape has ended.
    """
    meshes = pattern.num_positions
    back = [ended[number] for number in _backwards(pattern)][:-meshes]
    best, unlike = 0.0, float("inf")
    for together in range(1, meshes + 1):
        each = (back[-1] - back[-1 - together]) / together
        rounds = (back[-n] - back[-n - together] for n in range(2, meshes + 1))
        off = max((abs(seconds - each * together) for seconds in rounds), default=0.0)
        if off < unlike * (1 - _SAME):
            best, unlike = each, off
        if off <= _SAME * back[-1]:
            break
    return best


@lru_cache(maxsize=256)
def _backwards(pattern: Pattern) -> tuple[int, ...]:
    """The numbers of the first stage's backwards on the tape, without weight gradients."""
    stages_kinds = tape_of(pattern).code
    return tuple(number for number, code in enumerate(stages_kinds) if code // 2 in (1, 2))

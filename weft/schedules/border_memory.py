"""What a position holds at its borders beside what its microbatches keep, counted in its list.

In tensors, each of what crosses with one microbatch one way. A microbatch's input counts as kept
from its forward on. Beside that are held: inputs and gradients that are received ahead, gradients
until the weights' are made from them, results until their own backward, and gradients that were
handed on until they have arrived. Memory of what comes is used again and never given back, so that
it is as much as was ever in use at once. Where borders are cast, all that is on its way is a
message of its own, and becomes a tensor when it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from weft.schedules.action import Action
from weft.schedules.clocks import Clocks
from weft.schedules.known import Pattern, full_after, schedule_of_pattern
from weft.schedules.receives import receives, soonest
from weft.schedules.registry import SCHEDULES
from weft.schedules.releases import releases

_Moments = tuple[Sequence[Sequence[Action]], Sequence[Sequence[Action]]]
"""For every action of a position: what is received from then on, and what has arrived after it."""


DEEP = 6
"""Positions of a full pipeline, from which on each further one adds as much."""


@lru_cache(maxsize=1 << 14)
def borders_at_peak(pattern: Pattern, message: float = 1.0) -> tuple[float, ...]:
    """For every position, the tensors at its borders while it holds most microbatches.

    ``message``: what part of a tensor's bytes its message has; 1: the tensor itself is sent.

    Once the pipeline is full, further microbatches change nothing, but that ZB-V on two positions
    has one more where they are odd; where a schedule holds them all, each adds as many as the one
    before. Likewise further positions of a deep one. Stages of unlike meshes count as if theirs
    were alike.
    """
    full = full_after(pattern)
    more = 0 if pattern.lists or pattern.heads else pattern.num_microbatches - full
    if more > 0:
        if message == 1 and _grows_evenly(pattern):
            return _deeper(pattern)
        most = borders_at_peak(replace(pattern, num_microbatches=full), message)
        if not SCHEDULES[pattern.name].holds_every_microbatch:
            return most
        less = borders_at_peak(replace(pattern, num_microbatches=full - 1), message)
        return tuple(many + more * (many - few) for many, few in zip(most, less, strict=True))
    if pattern.num_positions == 1:
        return (0,)
    clocks = Clocks(schedule_of_pattern(pattern), heads=len(pattern.heads))
    last, coming = pattern.num_stages - (not pattern.heads), _received(clocks, pattern)
    found = []
    for position in range(pattern.num_positions):
        both: _Moments = coming[position], releases(clocks, position)
        summed = last - 1 if position in pattern.heads else None
        if message == 1:
            found.append(float(_peak(clocks, position, last, both, summed=summed)))
            continue
        messages = _messages(clocks, position, both)
        both = _as_messages(clocks, position, both)
        found.append(_peak(clocks, position, last, both, summed=summed) + message * messages)
    return tuple(found)


def _received(clocks: Clocks, pattern: Pattern) -> list[list[list[Action]]]:
    """As ``receives`` has it."""
    is_usual = not (pattern.lists or pattern.heads or pattern.in_flight)
    if not (is_usual and SCHEDULES[pattern.name].receives_as_proven):
        return receives(clocks)
    return [soonest(clocks, position) for position in range(pattern.num_positions)]


def _grows_evenly(pattern: Pattern) -> bool:
    """Deeper, where a list is not in rounds of its positions: those end where they do."""
    schedule = SCHEDULES[pattern.name]
    apart = pattern.in_flight or schedule.holds_every_microbatch or schedule.any_chunks
    return pattern.num_positions > DEEP + 1 and not apart


def _deeper(pattern: Pattern) -> tuple[float, ...]:
    """As two pipelines of few positions have it: the two first positions and the two last grow with
    the depth, and those between also along it."""
    chunks, deep = pattern.num_stages // pattern.num_positions, pattern.num_positions
    one, other = (
        borders_at_peak(replace(pattern, num_positions=number, num_stages=number * chunks))
        for number in (DEEP, DEEP + 1)
    )
    more, step = deep - DEEP, other[3] - other[2]
    first = [few + more * (many - few) for few, many in zip(one[:3], other[:3], strict=True)]
    last = [few + more * (many - few) for few, many in zip(one[-2:], other[-2:], strict=True)]
    between = [first[2] + number * step for number in range(deep - 4)]
    return (*first[:2], *between, *last)


def _as_messages(clocks: Clocks, position: int, both: _Moments) -> _Moments:
    """Where messages are others than tensors: these come when they are used, and go when their
    messages are made."""
    own, ahead = clocks.schedule[position], {each for coming in both[0] for each in coming}
    used = [[action] if action in ahead else [] for action in own]
    return used, [[action] if bool(clocks.takers(action)) else [] for action in own]


def _messages(clocks: Clocks, position: int, both: _Moments) -> int:
    """Most that are there at once: received and not used yet, or sent and perhaps not arrived."""
    waiting: set[Action] = set()
    most = sent = 0
    for action, coming, arrived in zip(clocks.schedule[position], *both, strict=True):
        waiting.update(coming)
        most = max(most, len(waiting) + sent)
        waiting.discard(action)
        sent += bool(clocks.takers(action))
        most = max(most, len(waiting) + sent)
        sent -= len(arrived)
    return most


def _peak(clocks: Clocks, position: int, last: int, both: _Moments, *, summed: int | None) -> int:
    """``last``: stages from this one on give no results; what parts of the head find is small.
    ``summed``: a stage here whose gradient comes from a part of the head here, beside others."""
    came: set[tuple[str, int, int]] = set()
    most_came = kept = beside = 0
    best = 0, 0
    for action, coming, arrived in zip(clocks.schedule[position], *both, strict=True):
        kind, stage, microbatch = action
        takes, gives = stage > 0, stage < last
        came.update(coming)
        most_came = max(most_came, len(came))
        if kind == "F":  # the input counts as kept now, the result comes
            kept += 1
            beside += gives - takes
        best = max(best, (kept, beside))
        if kind in ("B", "I"):  # the input and the result go, a gradient is handed on
            came.discard(("F", stage, microbatch))
            beside += 2 * takes - gives
        if kind in ("B", "W"):  # what weight gradients read of the gradient that came goes too
            gradient = ("B" if kind == "B" else "I", stage, microbatch)
            kept -= 1
            beside -= gives and (gradient not in came or stage == summed)
            came.discard(gradient)
        beside -= sum(sent.kind != "F" for sent in arrived)
    return most_came + best[1]

"""A list of actions as a short text: what a plan file keeps of an order that has no name.

``3F 4(B F) 3B`` is three forwards, four times a backward and a forward, three backwards. Every kind
takes the microbatches of a stage in order, so numbers of microbatches need not be said. On a mesh
of several stages, what follows the letter says which: ``F`` is of its first, ``F1`` of its second.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import get_args

from weft.schedules.action import Action, Kind

_TOKENS = re.compile(r"(\d*)([FBIW])(\d*)|(\d+)\(|(\))|\s+")
_KINDS: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
MOST_ACTIONS = 1 << 17
"""Of one text, which may repeat repetitions."""
_MOST_REPEATED = 64
"""Actions in a part that is written once and repeated."""

Turn = tuple[Kind, int]
"""A kind, and which of the mesh's stages."""


def read(text: str, stages: Sequence[int]) -> list[Action]:
    """The actions of a position that holds ``stages``, in model order.

    Raises:
        ValueError: it is not such a text, or names a stage that the position does not hold.
    """
    done: Counter[Turn] = Counter()
    actions = []
    for kind, place in _turns(text):
        if place >= len(stages):
            raise ValueError(f"{kind}{place} is of a stage that its mesh does not hold")
        actions.append(Action(kind, stages[place], done[kind, place]))
        done[kind, place] += 1
    return actions


def write(actions: Sequence[Action]) -> str:
    """The text of a position's actions; each kind takes a stage's microbatches in order."""
    stages = sorted({action.stage for action in actions})
    place = {stage: f"{number}" if number else "" for number, stage in enumerate(stages)}
    return " ".join(_shortened([f"{kind}{place[stage]}" for kind, stage, _ in actions]))


def _turns(text: str) -> list[Turn]:
    open_parts: list[tuple[int, list[Turn]]] = [(1, [])]
    at = 0
    while at < len(text):
        found = _TOKENS.match(text, at)
        if found is None:
            raise ValueError(f"{text[at : at + 9]!r} is none of F, B, I, W, a number and brackets")
        times, kind, place, again, closes = found.groups()
        at = found.end()
        if kind:
            turn = (_KINDS[kind], int(place or 0))
            _extend(open_parts[-1][1], [turn], int(times or 1))
        elif again:
            open_parts.append((int(again), []))
        elif closes:
            if len(open_parts) == 1:
                raise ValueError("a bracket closes that was not opened")
            count, part = open_parts.pop()
            _extend(open_parts[-1][1], part, count)
    if len(open_parts) > 1:
        raise ValueError("a bracket is not closed")
    return open_parts[0][1]


def _extend(turns: list[Turn], part: Sequence[Turn], times: int) -> None:
    if len(turns) + len(part) * times > MOST_ACTIONS:
        raise ValueError(f"it has more than {MOST_ACTIONS} actions")
    turns.extend(list(part) * times)


def _shortened(words: Sequence[str]) -> Iterator[str]:
    """Runs of one word by their number, and what repeats in a row once, in brackets."""
    at = 0
    plain: list[str] = []
    while at < len(words):
        length, times = _repeated(words, at)
        if times == 1:
            plain.append(words[at])
            at += 1
            continue
        yield from _counted(plain)
        plain = []
        part = words[at : at + length]
        yield f"{times}({' '.join(_counted(part))})" if length > 1 else f"{times}{part[0]}"
        at += length * times
    yield from _counted(plain)


def _repeated(words: Sequence[str], at: int) -> tuple[int, int]:
    """Of the parts that begin here and repeat, the length and number of that which covers most."""
    best = (1, 1)
    for length in range(1, min(_MOST_REPEATED, (len(words) - at) // 2) + 1):
        part, times = words[at : at + length], 1
        while words[at + times * length : at + (times + 1) * length] == part:
            times += 1
        if times > 1 and length * times > max(best[0] * best[1], length + 1):
            best = length, times
    return best


def _counted(words: Sequence[str]) -> Iterator[str]:
    for word, run in groupby(words):
        count = len(list(run))
        yield f"{count}{word}" if count > 1 else word

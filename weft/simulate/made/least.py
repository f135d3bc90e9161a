"""Seconds that a step takes at least, whatever the order: no search for a list goes below.

Every position does all that it has, and every wire carries all that goes over it: not before the
first microbatch can be there, and what is on its way after the last follows.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate
from typing import NamedTuple

from weft.simulate.made.board import Board, Tables

_FORWARD, _BACK = 0, 1


class _Sent(NamedTuple):
    """All messages of one border, one way."""

    first_s: float
    """From the begin of the step until one can leave, at least."""
    busy_s: float
    """All of them on the wire."""
    after_s: float
    """From when the last has left the wire to the end of the step, at least."""


def least_s(tables: Tables) -> float:
    """Of any list for such positions and borders, with all the room that it wants."""
    wires = defaultdict[tuple[str, int], list[_Sent]](list)
    down, up = _turning(tables)
    for border, near in enumerate(tables.near):
        if near:
            continue
        one, last = tables.carry[border]
        late, busy_s = tables.late[border], one * (tables.many - 1) + last
        first_s = tables.head[border] + tables.takes[border][_FORWARD][tables.many == 1]
        ways = (
            ("down", border, _Sent(first_s, busy_s, late + down[border + 1])),
            ("up", border + 1, _Sent(up[border + 1], busy_s, tables.back[border + 1] - last)),
        )
        for way, stage, sent in ways:
            shared = tables.is_shared[border]
            wires[("port", tables.place[stage]) if shared else (way, border)].append(sent)
    return max([Board(tables).bound()[0], *map(_carried_s, wires.values())])


def _carried_s(sent: list[_Sent]) -> float:
    """Of a wire."""
    first_s, after_s = min(each.first_s for each in sent), min(each.after_s for each in sent)
    return first_s + sum(each.busy_s for each in sent) + after_s


def _turning(tables: Tables) -> tuple[list[float], list[float]]:
    """By stage: from when the last forward's input is there to the end of the step, at least; and
    from the begin of the step to the end of the first backward."""
    alone, hops = tables.many == 1, [*zip(tables.carry, tables.late, strict=True)]
    forward = [
        takes[_FORWARD][True] + carry[True] + late
        for takes, (carry, late) in zip(tables.takes, hops, strict=False)
    ]
    back = [
        takes[_BACK][alone] + carry[alone] + late
        for takes, (carry, late) in zip(tables.takes[1:], hops, strict=True)
    ]
    turn = tables.takes[-1][_FORWARD][True] + tables.takes[-1][_BACK][True] + tables.back[-1]
    top = tables.head[-1] + tables.takes[-1][_FORWARD][alone]
    down = [*accumulate(reversed(forward), initial=turn)][::-1]
    ways = [*accumulate(reversed(back), initial=top)][::-1]
    own = [takes[_BACK][alone] for takes in tables.takes]
    return down, [way + one for way, one in zip(ways, own, strict=True)]

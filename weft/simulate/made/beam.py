"""Searches from board to board: rules that always take one choice, and a beam of the best few."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from weft.simulate.made.board import Board, Tables


@dataclass(frozen=True, slots=True)
class Rule:
    """What a position does next of what it could."""

    wishes: tuple[int, ...]
    """By kind: the lowest comes first."""
    patience: float
    """How long it waits for what comes first, in lengths of what could begin at once."""


RULES = tuple(
    Rule(wishes, patience) for wishes, patience in product([(1, 0, 2), (0, 1, 2)], [0.0, 0.5, 1.0])
)


def follow(tables: Tables, rule: Rule) -> Board:
    """The end of a step whose positions all keep to a rule."""
    board = Board(tables)
    while choices := board.conflict():
        soonest = min(choices, key=lambda each: each.start)
        until = soonest.start + rule.patience * (soonest.end - soonest.start)
        ready = [each for each in choices if each.start <= until]
        board = board.after(min(ready, key=lambda each: (rule.wishes[each.kind], -each.stage)))
    return board


def beam(tables: Tables, width: int) -> Board:
    """The best end that is found when, after each action, the best boards are kept: those with the
    least bound, then with the least idle time."""
    boards = [Board(tables)]
    while True:
        after = (board.after(choice) for board in boards for choice in board.conflict())
        unlike = {(*each.done, *each.free, *each.waiting): each for each in after}
        if not unlike:
            return min(boards, key=lambda each: each.end)
        ranked = [(each.bound(), n, each) for n, each in enumerate(unlike.values())]
        boards = [each for _, _, each in sorted(ranked, key=lambda each: each[:2])[:width]]

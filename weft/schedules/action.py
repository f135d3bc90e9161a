"""What a pipeline position does next: one action of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
"""Forward; whole backward; its two halves: gradient of the input, gradient of the weights."""


class Action(NamedTuple):
    """One piece of work of one stage on one microbatch."""

    kind: Kind
    stage: int
    """Number of the stage in model order; a position may hold several."""
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


Key = tuple[Kind, int, int]
"""An action without names: equal to it, and quicker to make where millions are looked up."""

Schedule = Sequence[Sequence[Action]]
"""For every pipeline position, first to last, its actions in order."""


def awaited(action: Action, num_stages: int, *, split: bool, heads: int = 0) -> tuple[Key, ...]:
    """What must come before ``action``, in a pipeline of ``num_stages`` stages.

    ``split``: backward of this pipeline comes in halves, I and W. ``heads``: how many of the
    stages, the last ones, are parts of the head side by side: a backward of one of them needs what
    the forwards of all have found, and each keeps the logits of one microbatch at a time.
    """
    kind, stage, microbatch = action
    chained = num_stages - heads
    back: Kind = "I" if split else "B"
    if kind == "F" and stage >= chained and microbatch:
        return ("F", chained - 1, microbatch), (back, stage, microbatch - 1)
    if kind == "F":
        return (("F", min(stage, chained) - 1, microbatch),) if stage else ()
    if kind == "W":
        return (("I", stage, microbatch),)
    if stage >= chained:
        return tuple(("F", part, microbatch) for part in range(chained, num_stages))
    after = range(stage + 1, num_stages if stage == chained - 1 else stage + 2)
    return (("F", stage, microbatch), *((back, each, microbatch) for each in after))


Waits = Callable[[Kind, int], tuple[tuple[Kind, int, int], ...]]
"""What any action of a kind on a stage waits for: kinds and stages, and how many microbatches
before its own. The first waits for none before it."""


def waits(num_stages: int, *, split: bool, heads: int = 0) -> Waits:
    """``awaited`` of all microbatches, worked out once for each kind and stage."""

    @cache
    def found(kind: Kind, stage: int) -> tuple[tuple[Kind, int, int], ...]:
        needs = awaited(Action(kind, stage, 1), num_stages, split=split, heads=heads)
        return tuple((kind, stage, 1 - microbatch) for kind, stage, microbatch in needs)

    return found

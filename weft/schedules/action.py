"""What a pipeline position does next: one action of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
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


def awaited(action: Action, num_stages: int, *, split: bool) -> tuple[Key, ...]:
    """What must come before ``action``, in a pipeline of ``num_stages`` stages.

    ``split``: backward of this pipeline comes in halves, I and W.
    """
    kind, stage, microbatch = action
    if kind == "F":
        return (("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (("I", stage, microbatch),)
    if stage == num_stages - 1:
        return (("F", stage, microbatch),)
    return ("F", stage, microbatch), ("I" if split else "B", stage + 1, microbatch)

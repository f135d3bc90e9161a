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


Schedule = Sequence[Sequence[Action]]
"""For every pipeline position, first to last, its actions in order."""


class Need(NamedTuple):
    """An action that must have ended before another may begin."""

    action: Action
    travels: bool
    """Its result comes from another stage."""


def needs(action: Action, num_stages: int, *, split: bool) -> list[Need]:
    """What must come before ``action``, in a pipeline of ``num_stages`` stages.

    ``split``: backward of this pipeline comes in halves, I and W.
    """
    kind, stage, microbatch = action
    back: Kind = "I" if split else "B"
    if kind == "F":
        return [Need(Action("F", stage - 1, microbatch), travels=True)] if stage else []
    if kind == "W":
        return [Need(Action("I", stage, microbatch), travels=False)]
    own = Need(Action("F", stage, microbatch), travels=False)
    if stage == num_stages - 1:
        return [own]
    return [own, Need(Action(back, stage + 1, microbatch), travels=True)]

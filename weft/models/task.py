"""What a family is trained to do, as far as whoever assembles a job has to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from weft.nn.stage import Buffer, Objective, Stage
from weft.plan.border import Border


class Task(Protocol):
    """From a model's description and the length of its samples to what the runtime asks for."""

    def objective(self, last: Stage, /) -> Objective:
        """What becomes of the last stage's output."""

    def border(self, spec: Any, seq_len: int, /) -> Border:
        """What crosses from any stage to the next."""

    def sizes(self, seq_len: int, /) -> Mapping[str, int]:
        """Of the logical dimensions that the job chooses, by name."""

    def weight_of_sample(self, seq_len: int, /) -> float:
        """About what one sample's weights add up to, a constant."""

    def buffers(self, spec: Any, /) -> Sequence[Buffer]:
        """Every buffer of the unsplit model."""

"""The starts of a run, as its records tell them: each counts its time anew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from weft.report.metrics import StepMetrics


class Start(NamedTuple):
    """Steps that one start of a run did, as far as later ones did not do them again."""

    first: int
    last: int
    seconds: float
    """Until the last of its steps that is recorded."""
    tokens: int


def starts(steps: Sequence[StepMetrics]) -> list[Start]:
    """In order. A step that ended sooner than it takes after the one before began a new start."""
    found: list[Start] = []
    before = -math.inf
    for metrics in steps:
        now, took = metrics.elapsed_s, metrics.step_time_s
        if not found or now - before < (took / 2 if took > 0 else 0.0):
            found.append(Start(metrics.step, metrics.step, 0.0, 0))
        first, _, seconds, tokens = found[-1]
        known = now if math.isfinite(now) else seconds
        found[-1] = Start(first, metrics.step, known, tokens + metrics.tokens)
        before = known
    return found

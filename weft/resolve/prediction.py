"""What a run is predicted to take, said before it starts, beside what it took."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.report.metrics import StepMetrics

PREDICTION_FILE = "prediction.json"
"""In the run folder: the ``Prediction`` of its last start."""
AUTO_FILE = "auto.json"
"""In the run folder: what ``plan.auto`` was asked and chose, which a resume keeps to."""
WARM_UP_STEPS = 2
"""First steps of a start that are left out: memory is allocated and code is met first in them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantities:
    """What can be told of a run both before and after it. None is not known."""

    step_time_s: float | None = None
    """Of one optimizer step, without evaluations and checkpoints."""
    tokens_per_s: float | None = None
    memory_gib: tuple[float, ...] = ()
    """Most that each rank holds, by rank."""
    sent_mb: float | None = None
    """By all ranks in one step, 10^6 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Before a run."""

    quantities: Quantities = Quantities()
    basis: tuple[str, ...] = ()
    """Where rates come from, in words."""
    problem: str = ""
    """Why there is no time; empty where there is one."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def measured(
    steps: Sequence[StepMetrics], *, memory_gib: Sequence[float], sent_mb: float
) -> Quantities:
    """What the steps of one start took: medians after the first few."""
    steady = steps[WARM_UP_STEPS:] or steps
    return Quantities(
        step_time_s=statistics.median(m.step_time_s for m in steady) if steady else None,
        tokens_per_s=statistics.median(m.tokens_per_s for m in steady) if steady else None,
        memory_gib=tuple(memory_gib),
        sent_mb=sent_mb,
    )


def beside(prediction: Prediction, took: Quantities) -> dict[str, Any]:
    """Both, as ``summary.json`` has them under ``prediction``."""
    return {
        "predicted": asdict(prediction.quantities),
        "measured": asdict(took),
        "basis": list(prediction.basis),
        "problem": prediction.problem,
    }

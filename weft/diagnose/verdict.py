"""Prove that a plan changes nothing, and that the one process it is compared with is right."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from weft.config.sections import Config
from weft.diagnose.reference import by_reference, lacks_reference
from weft.diagnose.verify import (
    Difference,
    RunsRanks,
    difference,
    enlarged_rounding,
    in_small,
    one_process,
    rehearse,
)
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan, Precision
from weft.precision.registry import PRECISIONS

TOLERANCE = {"float64": 1e-10, "float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
"""Largest relative difference that rounding explains, by dtype of the arithmetic: about a million
times its rounding error for fp64, looser below. What Adam's division makes of noise in gradients
that are nearly zero counts apart from it (``enlarged_rounding``)."""


def tolerance_of(precision: Precision) -> float:
    """What of it rounding explains."""
    return TOLERANCE[PRECISIONS[precision].compute.stored_as]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A plan compared with one process, and that with the reference."""

    plan: Difference
    """Of the plan from one process."""
    reference: Difference | None
    """Of one process from the reference; None: there is none."""
    lacks: str
    """Why there is none; empty where there is."""
    dtype: Precision
    ranks: int
    steps: int

    @property
    def tolerance(self) -> float:
        return tolerance_of(self.dtype)

    def accepts(self, found: Difference | None) -> bool:
        """Nothing was found outside the tolerance."""
        return found is None or found.largest <= self.tolerance

    @property
    def ok(self) -> bool:
        return self.accepts(self.plan) and self.accepts(self.reference)

    def to_json(self) -> dict[str, Any]:
        facts = {"dtype": self.dtype, "ranks": self.ranks, "steps": self.steps}
        limits = {"tolerance": self.tolerance, "ok": self.ok}
        found = None if self.reference is None else _numbers(self.reference)
        reference = {"max_rel": found, "lacks": self.lacks}
        return {"max_rel": _numbers(self.plan), "reference": reference, **facts, **limits}


def _numbers(found: Difference) -> dict[str, float | None]:
    """None for what is not finite: JSON has no such numbers."""
    return {n: value if isfinite(value) else None for n, value in asdict(found).items()}


def verify_plan(
    run: RunsRanks, plan: Plan, spec: ModelSpec, config: Config, *, steps: int
) -> Verdict:
    """Rehearse the plan with a small model of the same kind and compare it with one process, and
    that one with the reference."""
    plan, rehearsal = in_small(plan, spec, config, steps)
    alone = rehearse(run, one_process(plan), rehearsal)
    precision = plan.rank_plan(0).stage_plan.precision
    lacks = lacks_reference(rehearsal)
    if PRECISIONS[precision].products is not None:
        lacks = "it has no products in eight bits"
    known = None if lacks else by_reference(rehearsal, plan.global_batch)
    enlarged = {} if known is None else enlarged_rounding(known, rehearsal, precision)
    return Verdict(
        plan=difference(alone, rehearse(run, plan, rehearsal), enlarged),
        reference=None if known is None else difference(known, alone, enlarged),
        lacks=lacks,
        dtype=precision,
        ranks=plan.world_size,
        steps=steps,
    )

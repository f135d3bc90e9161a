"""What mixing costs: the rates of the parts and of the mix, and what follows from them.

Efficiency is the rate of the mix divided by the sum of the rates of its parts, each part tuned
alone with the same job (the definition of FlagScale's reports of mixed training). The gain of
pooling is what the parts' own plans reach side by side, over the faster part; the gain of
re-planning is what the best plan of the mix adds to that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import mean, median, stdev
from typing import Any

from weft.mix.chips import Kind
from weft.mix.questions import Trial, micro_of, recomputes
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.simulate.play import Timeline

_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""95 % of Student's distribution lies within so many deviations, for 2, 3, ... values."""
_NORMAL = 1.96
_MIB = 1024
"""In a GiB."""


@dataclass(slots=True)
class Rates:
    """Tokens per second of a trial, one for each repeat; or why there are none."""

    trial: Trial
    values: list[float] = field(default_factory=list)
    problem: str = ""
    short: int | None = None
    """The rank that ran out of memory, where one did."""
    was_killed: bool = False
    """Somebody outside ended a rank, which says nothing of the trial."""
    busy: Sequence[float] = ()
    """By rank: part of a step, in its last run, in which its chip computed."""
    step_s: float = 0.0
    memory_gib: float = 0.0
    """Most that any rank held."""
    kept_gib: float = 0.0
    """Most that a rank is predicted to hold where nothing is recomputed."""
    timelines: Sequence[Timeline] = ()
    """Of each pipeline: a step as the planner predicts it from the rate of each kind alone."""
    is_final: bool = False
    """Repeated, and not only run to compare plans."""

    @property
    def middle(self) -> float:
        return median(self.values) if self.values else 0.0

    @property
    def spread(self) -> float:
        """(largest - smallest) / middle."""
        return (max(self.values) - min(self.values)) / self.middle if self.values else 0.0


def uncertainty(values: Sequence[float]) -> float | None:
    """Half of the interval in which the mean lies in 95 of 100 cases; None: one value."""
    number = len(values)
    return student(number) * stdev(values) / sqrt(number) if number >= 2 else None


def student(number: int) -> float:
    """So many deviations of the mean of so many values hold 95 %; two values at least."""
    return _STUDENT[number - 2] if number - 2 < len(_STUDENT) else _NORMAL


@dataclass(frozen=True)
class MixReport:
    """What the parts reach, what the mix reaches, and what of it comes from where."""

    parts: Mapping[str, Rates]
    mixes: Sequence[Rates]
    reasons: Sequence[str] = ()
    """In what the plans of parts and mix differ other than in who computes what."""

    @property
    def lower(self) -> float:
        """The faster part alone."""
        return max(rates.middle for rates in self.parts.values())

    @property
    def upper(self) -> float:
        """All parts at their own rates."""
        return sum(rates.middle for rates in self.parts.values())

    @property
    def best(self) -> Rates:
        """Of those that were repeated, where some were: tuning runs are short."""
        return max(self.mixes, key=lambda rates: (rates.is_final, rates.middle))

    @property
    def pooled(self) -> Rates | None:
        """The parts' own plans side by side, their shares tuned; None where they do not run."""
        of_it = [r for r in self.mixes if r.trial.generation == "pooled" and r.values]
        return max(of_it, key=lambda rates: (rates.is_final, rates.middle), default=None)

    @property
    def efficiency(self) -> float:
        return self.best.middle / self.upper

    @property
    def efficiencies(self) -> list[float]:
        """Of each repeat by itself: what slows the whole machine for a while cancels."""
        columns = zip(*(rates.values for rates in self.parts.values()), strict=False)
        both = zip(self.best.values, columns, strict=False)
        return [mixed / sum(alone) for mixed, alone in both]

    @property
    def pooling_gain(self) -> float | None:
        """None where the parts' own plans do not run side by side."""
        return self.pooled.middle / self.lower if self.pooled else None

    @property
    def replanning_gain(self) -> float | None:
        """None where the parts' own plans do not run side by side."""
        return self.best.middle / self.pooled.middle if self.pooled else None

    def to_json(self) -> dict[str, Any]:
        spreads = [rates.spread for rates in [*self.parts.values(), self.best]]
        each = self.efficiencies
        return {
            "parts": {name: rates.middle for name, rates in self.parts.items()},
            "lower": self.lower,
            "upper": self.upper,
            "mix": self.best.middle,
            "efficiency": self.efficiency,
            "efficiencies": each,
            "efficiency_mean": mean(each),
            "efficiency_uncertainty": uncertainty(each),
            "pooling_gain": self.pooling_gain,
            "replanning_gain": self.replanning_gain,
            "repeats": len(self.best.values),
            "spread": max(spreads),
            "reasons": list(self.reasons),
            "plans": {
                "parts": {name: rates.trial.name for name, rates in self.parts.items()},
                "mix": self.best.trial.name,
            },
            "trials": [_as_json(rates) for rates in self.mixes],
        }


def _as_json(rates: Rates) -> dict[str, Any]:
    return {
        "name": rates.trial.name,
        "generation": rates.trial.generation,
        "tokens_per_s": rates.middle,
        "values": rates.values,
        "spread": rates.spread,
        "busy": list(rates.busy),
        "memory_gib": rates.memory_gib,
        "problem": rates.problem,
    }


def in_rows(report: MixReport) -> list[dict[str, str]]:
    """What was measured, for a table."""
    parts = [_row(name, rates, report.upper) for name, rates in report.parts.items()]
    ordered = sorted(report.mixes, key=lambda rates: (not rates.is_final, -rates.middle))
    return parts + [_row("mix", rates, report.upper) for rates in ordered]


def _row(of: str, rates: Rates, upper: float) -> dict[str, str]:
    row = {"of": of, "plan": rates.trial.name}
    if not rates.values:
        return (
            row | dict.fromkeys(("tokens/s", "+-", "of sum", "busy"), "") | {"note": rates.problem}
        )
    within = uncertainty(rates.values)
    number = len(rates.values)
    return row | {
        "tokens/s": f"{rates.middle:.0f}",
        "+-": "" if within is None else f"{within / rates.middle:.1%}",
        "of sum": f"{rates.middle / upper:.3f}",
        "busy": " ".join(f"{part:.0%}" for part in rates.busy),
        "note": f"{number} repeat{'s' * (number > 1)}" if rates.is_final else "tuning run",
    }


def reasons(
    best: Plan,
    alone: Mapping[str, Sequence[Rates]],
    limits: Mapping[str, float | None],
    kinds: Sequence[Kind],
) -> list[str]:
    """Why a mix may reach more than its parts: sentences on each kind that computes otherwise.

    A part alone holds the whole model. Where that does not fit it recomputes, or takes smaller
    microbatches; in the mix it may hold less and need neither. Efficiency then compares unlike
    work, which has to be said.

    Args:
        alone: Every trial of each kind by itself, those that failed among them.
        limits: GiB of a chip of each kind; None has no limit.
    """
    found = []
    for kind in kinds:
        fastest = max(alone[kind.name], key=lambda rates: rates.middle)
        chosen = fastest.trial.plan
        here = list(_of(best, kind))
        again = any(stage.recompute != "off" for _, stage in here)
        sizes = micro_of(here)
        usual = micro_of((chosen.pipelines[p], stage) for p, _, stage in chosen.stages())
        if again and not recomputes(chosen):
            found.append(f"{kind.name} recomputes in the mix and not alone")
        elif recomputes(chosen) and not again:
            layers = sum(stage.layers[1] - stage.layers[0] for _, stage in here)
            mixed = f"in the mix it holds {layers:g} of {best.num_layers} layers and does not"
            need = _needed(kind, fastest, alone, limits[kind.name])
            found.append(f"{kind.name} alone recomputes{need}; {mixed}")
        if sizes != usual:
            found.append(
                f"{kind.name} has micro-batches of {usual} alone and of {sizes} in the mix"
            )
    return found


def _of(plan: Plan, kind: Kind) -> Iterator[tuple[PipelinePlan, StagePlan]]:
    """What a kind's chips do in a plan."""
    for number, _, stage in plan.stages():
        if set(stage.mesh.ranks) & set(kind.ranks):
            yield plan.pipelines[number], stage


def _needed(
    kind: Kind, chosen: Rates, alone: Mapping[str, Sequence[Rates]], limit: float | None
) -> str:
    """What the plans that failed here without recomputation take on chips where they run.

    Where none was tried, what is predicted.
    """
    failed = [
        rates.trial.plan
        for rates in alone[kind.name]
        if rates.problem and not recomputes(rates.trial.plan)
    ]
    taken = [
        rates.memory_gib
        for trials in alone.values()
        for rates in trials
        if rates.values and rates.trial.plan in failed
    ]
    if limit is None:
        return ""
    gib = min(taken, default=chosen.kept_gib)
    return f", as without that {gib * _MIB:.0f} MiB are needed and it has {limit * _MIB:.0f}"

"""One plan beside the best: by how much it loses, where, and what the search made of it."""

from __future__ import annotations

from dataclasses import dataclass

from weft.cluster.view import ClusterView
from weft.plan.plan import Plan
from weft.planner.explain import settings
from weft.planner.fit import shortages, smallest_change
from weft.planner.forecast import Forecast, forecast
from weft.planner.naming import name_of
from weft.planner.options import Options
from weft.planner.search.found import Reason
from weft.planner.search.verdict import verdict
from weft.planner.workload import Workload
from weft.simulate.step import Knowledge


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedPart:
    """Of a step, or of memory, in both plans."""

    name: str
    unit: str
    best: float
    other: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A plan that a person asked about."""

    name: str
    settings: str
    step_s: float
    slower: float
    """ComparedPart of the best step by which its own is longer; below zero it is faster."""
    fits: bool
    reason: Reason
    parts: tuple[ComparedPart, ...]

    @property
    def words(self) -> str:
        """What became of it."""
        ahead = self.slower < 0 and self.fits
        return f"{'faster than what was found; ' * ahead}{self.reason.words}"

    def as_json(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return {
            "name": self.name,
            "settings": self.settings,
            "step_time_s": self.step_s,
            "slower": self.slower,
            "fits": self.fits,
            "reason": self.reason.kind,
            "words": self.words,
            "parts": [
                {"name": part.name, "unit": part.unit, "best": part.best, "rival": part.other}
                for part in self.parts
            ],
        }


def compare(
    plan: Plan,
    best: Forecast,
    workload: Workload,
    cluster: ClusterView,
    knowledge: Knowledge,
    options: Options,
) -> Comparison:
    """Forecast a plan by the same model, whether it fits or not, beside the best.

    Args:
        cluster: All chips; the ranks of ``plan`` are numbered over them.
    """
    cast = forecast(plan, workload, cluster, knowledge)
    short = shortages(plan, workload, cluster, knowledge, options.memory_part)
    if short:
        worst = short[0]
        needs = f"{worst.key} on {worst.chip.name} needs {worst.need_gib:.1f} GiB"
        change = smallest_change(plan, workload, cluster, knowledge)
        words = f"it does not fit: {needs} of {worst.room_gib:.1f} that may be planned. {change}"
        reason = Reason("memory", words)
    else:
        reason = verdict(plan, workload, cluster, knowledge, options, best_s=best.step_s)
    return Comparison(
        name=name_of(plan, cluster),
        settings=settings(plan),
        step_s=cast.step_s,
        slower=cast.step_s / best.step_s - 1,
        fits=not short,
        reason=reason,
        parts=_parts(best, cast),
    )


def _parts(best: Forecast, other: Forecast) -> tuple[ComparedPart, ...]:
    """Of the position that works longest, and of the one with least room."""
    ours, theirs = best.slowest, other.slowest
    seconds = {
        "computing": (ours.computing_s, theirs.computing_s),
        "messages inside layers": (ours.communicating_s, theirs.communicating_s),
        "waiting for others": (ours.waiting_s, theirs.waiting_s),
        "exchange and update": (ours.once_s, theirs.once_s),
        "whole step": (best.step_s, other.step_s),
    }
    parts = [ComparedPart(name=name, unit="s", best=a, other=b) for name, (a, b) in seconds.items()]
    a, b = best.fullest, other.fullest
    gib = ComparedPart(
        name="fullest rank", unit="GiB", best=a.memory.total / 2**30, other=b.memory.total / 2**30
    )
    return (*parts, gib)

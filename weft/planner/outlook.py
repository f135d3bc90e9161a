"""All that is worth knowing of a plan on a cluster before anything runs: what commands print."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from weft.cluster.view import ClusterView
from weft.cost.interval import PART
from weft.plan.plan import Plan
from weft.planner.explain import (
    SEARCHING_S,
    Alternative,
    Help,
    alternatives,
    reasons_as_json,
    what_cuts_save,
    what_domains_save,
    what_would_help,
    why_no_domains,
)
from weft.planner.fit import shortages, smallest_change
from weft.planner.forecast import Forecast, forecast
from weft.planner.in_sites import Apart
from weft.planner.limits import Limits
from weft.planner.naming import name_of
from weft.planner.problem import Problem
from weft.planner.runnable import why_not_run
from weft.planner.search import Found, NoPlan, Watch
from weft.planner.sureness import Sureness, surest


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """A plan, what it will do, and why it is the one."""

    forecast: Forecast
    found: Found | None = None
    """None: the plan was given."""
    alternatives: tuple[Alternative, ...] = ()
    helps: tuple[Help, ...] = ()
    apart: Apart | None = None
    """What its sites reach, or those of its cluster would, that train for themselves."""
    surer: str = ""
    """Why it was taken before one that is predicted as fast, in words; else empty."""
    no_domains: str = ""
    """Why it has none, in words, where somebody wants explanations."""

    @property
    def name(self) -> str:
        """In words."""
        return name_of(self.forecast.plan, self.cluster)

    @property
    def cluster(self) -> ClusterView:
        """The chips that the plan uses."""
        return self.forecast.problem.cluster

    @cached_property
    def not_run(self) -> tuple[str, ...]:
        """Why this version cannot run it; empty where it can."""
        return why_not_run(self.forecast.plan, self.cluster)

    @cached_property
    def domains(self) -> str:
        """What its domains save, in words, or why it has none; may be empty."""
        return what_domains_save(self.forecast) or self.no_domains

    @cached_property
    def cuts(self) -> str:
        """What its borders inside layers save, in words; may be empty."""
        return what_cuts_save(self.forecast)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the search passed by because this version cannot run it, the first reasons."""
        reasons = {} if self.found is None else self.found.pruned.reasons
        return tuple(dict.fromkeys(reasons["unrun"].examples)) if "unrun" in reasons else ()

    @cached_property
    def sureness(self) -> Sureness:
        """How sure its forecast is."""
        return Sureness.of(self.cluster, self.forecast.problem.knowledge)

    @cached_property
    def limits(self) -> Limits:
        return Limits(self.forecast)

    @property
    def advice(self) -> tuple[str, ...]:
        """What usually helps against what limits it."""
        return tuple(self.limits.advice())

    def predicted(self) -> dict[str, Any]:
        """Numbers of the forecast."""
        cast, sure = self.forecast, self.sureness
        fullest = sure.memory(cast.fullest.memory.total)
        traffic: dict[str, dict[str, float]] = {}
        for way, num_bytes in cast.sent.items():
            traffic.setdefault(way.name, {})[way.reach] = num_bytes / 1e9
        return {
            "step_time_s": cast.step_s,
            "interval": {
                "part": PART,
                "step_time_s": list(sure.step(cast.step_s)),
                "fullest_gib": [num_bytes / 2**30 for num_bytes in fullest],
                "why": sure.words,
            },
            "tokens_per_s": cast.tokens_per_s,
            "mfu": cast.mfu,
            "memory_gib": [memory.total / 2**30 for memory in cast.memory_by_rank()],
            "traffic_gb": traffic,
            "joules_per_token": cast.joules_per_token,
            "price_per_million_tokens": cast.price_per_million_tokens,
            "stages": [
                {
                    **position.as_json(),
                    "computing_s": position.computing_s,
                    "communicating_s": position.communicating_s,
                    "memory_gib": {
                        name: num_bytes / 2**30
                        for name, num_bytes in position.memory.by_category().items()
                    },
                }
                for position in cast.positions
            ],
        }

    def as_json(self) -> dict[str, Any]:
        """What ``weft plan --json`` prints beside the model."""
        found = self.found
        result = {
            "plan": json.loads(self.forecast.plan.to_json()),
            "not_run": list(self.not_run),
            "predicted": self.predicted(),
            "limits": {**self.limits.as_json(), "advice": list(self.advice)},
            "alternatives": [alternative.as_json() for alternative in self.alternatives],
            "search": None
            if found is None
            else {
                "seconds": found.seconds,
                "considered": found.considered,
                "bound_s": found.bound_s,
                "gap": found.gap,
                "exhausts": found.exhausts,
                "cut_short": found.is_cut_short,
                "pruned": {kind: each.count for kind, each in found.pruned.reasons.items()},
                "reasons": reasons_as_json(found),
            },
        }
        result |= {} if self.apart is None else {"sites": self.apart.as_json()}
        return result | ({"would_help": [h.as_json() for h in self.helps]} if self.helps else {})


def outlook_of_plan(plan: Plan, problem: Problem) -> Outlook:
    """Of a plan that a person gave.

    Raises:
        NoPlan: it does not fit; says what is short where, and the smallest change.
    """
    refuse_too_large(plan, problem)
    return Outlook(forecast=forecast(plan, problem))


def refuse_too_large(plan: Plan, problem: Problem) -> None:
    """Raises NoPlan where a stage needs more memory than its chips have."""
    short = shortages(plan, problem)
    if not short:
        return
    worst, part = short[0], problem.options.memory_part
    expected = (
        f"at most {worst.room_gib:.1f} GiB a rank, {part:.0%} of {worst.whose}; "
        f"{worst.short_gib:.1f} GiB are missing"
    )
    also = (f"{other.key} lacks {other.short_gib:.1f} GiB." for other in short[1:4])
    hint = " ".join([smallest_change(plan, problem), *also])
    raise NoPlan(worst.key, f"{worst.need_gib:.1f} GiB", expected, hint)


def outlook_of_search(
    found: Found, problem: Problem, *, explain: bool, watch: Watch | None = None
) -> Outlook:
    """Of the best plan that a search found, or one that is as fast and surer; further searches
    explain it, which the watch may end."""
    found, surer = surest(found, problem.knowledge)
    best = found.best
    cast = forecast(best.plan, problem.on(best.cluster), time=best.time)
    helps = tuple[Help, ...]()
    if explain:
        searches = 0 if found.is_cut_short else int(SEARCHING_S / max(found.seconds, 0.01))
        helps = tuple(what_would_help(problem, best, searches=searches, watch=watch))
    return Outlook(
        forecast=cast,
        found=found,
        alternatives=tuple(alternatives(found, cast, problem)),
        helps=helps,
        surer=surer,
        no_domains=why_no_domains(cast) if explain else "",
    )

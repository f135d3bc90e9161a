"""All that is worth knowing of a plan on a cluster before anything runs: what commands print."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from weft.cluster.view import ClusterView
from weft.config.errors import ConfigError
from weft.plan.plan import Plan
from weft.planner.explain import (
    SEARCH_AGAIN_S,
    Alternative,
    Help,
    alternatives,
    reasons_as_json,
    what_would_help,
)
from weft.planner.fit import MEMORY_PART, shortages, smallest_change
from weft.planner.forecast import Forecast, forecast
from weft.planner.limits import Limits, advice, limits_of
from weft.planner.naming import name_of
from weft.planner.options import Options
from weft.planner.search import Candidate, Found
from weft.planner.workload import Workload
from weft.simulate.step import Knowledge


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """A plan, what it will do, and why it is the one."""

    name: str
    """In words."""
    cluster: ClusterView
    """The chips that the plan uses."""
    forecast: Forecast
    limits: Limits
    found: Found | None = None
    """None: the plan was given."""
    alternatives: tuple[Alternative, ...] = ()
    helps: tuple[Help, ...] = ()

    @property
    def advice(self) -> tuple[str, ...]:
        """What usually helps against what limits it."""
        return tuple(advice(self.forecast, self.limits))

    def predicted(self) -> dict[str, Any]:
        """Numbers of the forecast."""
        cast = self.forecast
        traffic: dict[str, dict[str, float]] = {}
        for way, num_bytes in cast.sent.items():
            traffic.setdefault(way.name, {})[way.reach] = num_bytes / 1e9
        return {
            "step_time_s": cast.step_s,
            "tokens_per_s": cast.tokens_per_s,
            "mfu": cast.mfu,
            "memory_gib": [memory.total / 2**30 for memory in cast.memory_by_rank()],
            "traffic_gb": traffic,
            "joules_per_token": cast.joules_per_token,
            "price_per_million_tokens": cast.price_per_million_tokens,
            "stages": [
                {
                    "pipeline": position.pipeline,
                    "stages": list(position.stages),
                    "chip": position.chip.name,
                    "num_ranks": len(position.ranks),
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
            "predicted": self.predicted(),
            "limits": {**self.limits.as_json(), "advice": list(self.advice)},
            "alternatives": [alternative.as_json() for alternative in self.alternatives],
            "search": None
            if found is None
            else {
                "seconds": found.seconds,
                "considered": found.considered,
                "pruned": {kind: each.count for kind, each in found.pruned.reasons.items()},
                "reasons": reasons_as_json(found),
            },
        }
        return result | ({"would_help": [h.as_json() for h in self.helps]} if self.helps else {})


def outlook_of_plan(
    plan: Plan, workload: Workload, cluster: ClusterView, knowledge: Knowledge
) -> Outlook:
    """Of a plan that a person gave.

    Raises:
        ConfigError: it does not fit; says what is short where, and the smallest change.
    """
    refuse_too_large(plan, workload, cluster, knowledge)
    cast = forecast(plan, workload, cluster, knowledge)
    name = name_of(plan, cluster)
    return Outlook(name=name, cluster=cluster, forecast=cast, limits=limits_of(cast))


def refuse_too_large(
    plan: Plan, workload: Workload, cluster: ClusterView, knowledge: Knowledge
) -> None:
    """Raises ConfigError where a stage needs more memory than its chips have."""
    short = shortages(plan, workload, cluster, knowledge)
    if not short:
        return
    worst = short[0]
    expected = (
        f"at most {worst.room_gib:.1f} GiB a rank, {MEMORY_PART:.0%} of a {worst.chip.name}; "
        f"{worst.short_gib:.1f} GiB are missing"
    )
    also = [f"{other.key} lacks {other.short_gib:.1f} GiB" for other in short[1:4]]
    hint = " ".join(
        [smallest_change(plan, workload, cluster, knowledge), *(f"{words}." for words in also)]
    )
    raise ConfigError(worst.key, f"{worst.need_gib:.1f} GiB", expected, hint)


def outlook_of_search(
    found: Found,
    workload: Workload,
    knowledge: Knowledge,
    options: Options,
    *,
    everything: ClusterView,
    explain: bool,
) -> Outlook:
    """Of the best plan that a search found; ``everything``: the chips that it could choose from."""
    best: Candidate = found.best
    cast = forecast(best.plan, workload, best.cluster, knowledge, time=best.time)
    helps: tuple[Help, ...] = ()
    if explain:
        again = found.seconds < SEARCH_AGAIN_S
        helps = tuple(
            what_would_help(everything, workload, knowledge, options, best=best, again=again)
        )
    return Outlook(
        name=best.name,
        cluster=best.cluster,
        forecast=cast,
        limits=limits_of(cast),
        found=found,
        alternatives=tuple(alternatives(found, cast, workload, knowledge, options)),
        helps=helps,
    )

"""Borders whose traffic is cast: from the words of a configuration to the plan; their rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft.config.errors import ConfigError
from weft.config.plan_sections import Between
from weft.cost.work import width_of
from weft.plan.plan import PipelinePlan, Plan, Precision, StagePlan
from weft.precision.casts import CASTS


def saves_bytes(cast: str, precision: Precision) -> bool:
    """It is less than numbers have in this precision."""
    return CASTS[cast].value_bytes < width_of(precision)


def with_casts(
    plan: Plan, cast: str, between: Between | None, node_of: Callable[[int], object]
) -> Plan:
    """The plan with its borders cast, those ``between`` unlike nodes or families alone if asked;
    not where that saves nothing."""

    def is_cast(stage: StagePlan, after: StagePlan) -> bool:
        apart = {
            None: True,
            "nodes": len({node_of(r) for r in (*stage.mesh.ranks, *after.mesh.ranks)}) > 1,
            "families": stage.device != after.device,
        }[between]
        return apart and stage.mesh != after.mesh and saves_bytes(cast, stage.precision)

    def changed(pipeline: PipelinePlan) -> PipelinePlan:
        *before, last = pipeline.stages
        both = zip(before, pipeline.stages[1:], strict=True)
        first = (replace(a, border=cast) if is_cast(a, b) else a for a, b in both)
        return replace(pipeline, stages=(*first, last))

    return replace(plan, pipelines=tuple(map(changed, plan.pipelines)))


def refuse_idle_cast(plan: Plan, cast: str, between: Between | None) -> None:
    """Refuse what ``with_casts`` found no border for.

    Raises:
        ConfigError: names the key, and what would do.
    """
    if not plan.casts:
        several = any(len(pipeline.positions()) > 1 for pipeline in plan.pipelines)
        where = f" between {between}" if between else " between stages"
        hint = f"No border{where} has numbers of more bytes." if several else "There is one stage."
        raise ConfigError("plan.border", cast, "null", hint)


def check_casts(plan: Plan) -> None:
    """Casts are of borders that something is sent over, in fewer bytes, and of sums of domains.

    Raises:
        ConfigError: one is not.
    """
    if plan.sums not in ("", *CASTS):
        raise ConfigError("sums", plan.sums, f"one of {', '.join(map(repr, CASTS))}, or none")
    if plan.sums and not plan.domains:
        raise ConfigError("sums", plan.sums, "none without domains", "They are what it is between.")
    for p, s, stage in plan.stages():
        key, after = f"pipelines[{p}].stages[{s}].border", plan.pipelines[p].stages[s + 1 : s + 2]
        if stage.border not in ("", *CASTS):
            expected = f"one of {', '.join(map(repr, CASTS))}, or none"
            raise ConfigError(key, stage.border, expected)
        if stage.border and (not after or after[0].mesh == stage.mesh):
            hint = "Nothing is sent to the next stage."
            raise ConfigError(key, stage.border, "none on such a stage", hint)
        if stage.border and not saves_bytes(stage.border, stage.precision):
            expected = f"what has fewer bytes than {stage.precision}, or none"
            raise ConfigError(key, stage.border, expected)

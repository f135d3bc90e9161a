"""What is cast on its way: from the words of a configuration to the plan; its rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from weft.config.errors import ConfigError
from weft.config.plan_sections import Between
from weft.cost.work import width_of
from weft.plan.plan import PipelinePlan, Plan, Precision, StagePlan
from weft.precision.casts import CASTS
from weft.precision.registry import PRECISIONS

GATHERED = "fp8"
"""As ``StagePlan.gather`` has it."""


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


def with_gather(
    plan: Plan, between: Literal["nodes"] | None, node_of: Callable[[int], object]
) -> Plan:
    """The plan whose stages gather weights in the eight bits of their products; only those that
    gather ``between`` nodes if asked.

    Raises:
        ConfigError: none does.
    """

    every = list(plan.stages())
    able = [(p, s, stage) for p, s, stage in every if not _why_not_gathered(stage)]
    chosen = {
        stage
        for p, s, stage in able
        if between is None or any(len({*map(node_of, ranks)}) > 1 for ranks in _near(plan, p, s))
    }
    if not chosen:
        far = "No stage's ranks are on several nodes."
        hint = far if able else _why_not_gathered(every[0][2])
        raise ConfigError("plan.gather", GATHERED, "null", hint)
    return plan.each(lambda stage: replace(stage, gather=GATHERED) if stage in chosen else stage)


def with_reduction(
    plan: Plan,
    cast: str,
    between: Literal["nodes"] | None,
    node_of: Callable[[int], object],
) -> Plan:
    """The plan whose stages cast gradients that ranks of one domain sum; only those that do so
    ``between`` nodes if asked.

    Raises:
        ConfigError: none does, or that saves nothing.
    """
    if not saves_bytes(cast, _summed(plan)):
        expected = f"what has fewer bytes than {_summed(plan)}, or null"
        raise ConfigError("plan.reduction", cast, expected)
    summing = {
        stage: [ranks for ranks in _near(plan, p, s, always=True) if len(ranks) > 1]
        for p, s, stage in plan.stages()
    }
    chosen = {
        stage
        for stage, groups in summing.items()
        if any(between is None or len({*map(node_of, ranks)}) > 1 for ranks in groups)
    }
    if not chosen:
        hint = "No ranks that sum are on several nodes." if any(summing.values()) else ""
        raise ConfigError("plan.reduction", cast, "null", hint or "No ranks hold the same.")
    return plan.each(lambda stage: replace(stage, reduction=cast) if stage in chosen else stage)


def _summed(plan: Plan) -> Precision:
    """What has the numbers in which gradients are summed; the same for all stages."""
    roles = PRECISIONS[plan.pipelines[0].stages[0].precision]
    return "fp64" if roles.reduction.stored_as == "float64" else "fp32"


def _near(plan: Plan, p: int, s: int, *, always: bool = False) -> tuple[tuple[int, ...], ...]:
    """Ranks that gather from each other what a stage computes with, by domain; or, ``always``, that
    sum its gradients."""
    stage = plan.pipelines[p].stages[s]
    beside = (
        [stage]
        if stage.zero == 3 and not always
        else [e for *_, e in plan.stages_with(plan.units(p, s))]
    )
    return plan.by_domain({rank for each in beside for rank in each.mesh.ranks})


def _why_not_gathered(stage: StagePlan) -> str:
    """Why a stage cannot gather weights in eight bits; empty where it can."""
    products = PRECISIONS[stage.precision].products
    if products is None or not products.rounds_weights_once:
        return "Products of precision fp8 or fp8-blockwise alone round a weight once, and then all."
    if not stage.zero and stage.param_tier == "device":
        return "With zero: 1, 2 or 3 ranks gather what others keep."
    return ""


def check_casts(plan: Plan) -> None:
    """Casts are of borders that something is sent over, in fewer bytes, of sums of domains, and of
    weights that products round.

    Raises:
        ConfigError: one is not.
    """
    if plan.sums not in ("", *CASTS):
        raise ConfigError("sums", plan.sums, f"one of {', '.join(map(repr, CASTS))}, or none")
    if plan.sums and not plan.domains:
        raise ConfigError("sums", plan.sums, "none without domains", "They are what it is between.")
    for p, s, stage in plan.stages():
        _check_gather(f"pipelines[{p}].stages[{s}].gather", stage)
        _check_reduction(f"pipelines[{p}].stages[{s}].reduction", plan, p, s)
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


def _check_reduction(key: str, plan: Plan, p: int, s: int) -> None:
    cast = plan.pipelines[p].stages[s].reduction
    if cast not in ("", *CASTS):
        raise ConfigError(key, cast, f"one of {', '.join(map(repr, CASTS))}, or none")
    if cast and all(len(ranks) == 1 for ranks in _near(plan, p, s, always=True)):
        raise ConfigError(key, cast, "none on such a stage", "No other rank holds the same.")


def _check_gather(key: str, stage: StagePlan) -> None:
    if stage.gather not in ("", GATHERED):
        raise ConfigError(key, stage.gather, f"{GATHERED!r} or ''")
    why = _why_not_gathered(stage)
    if stage.gather and why:
        raise ConfigError(key, stage.gather, "'' on this stage", why)

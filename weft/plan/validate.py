"""Refuse a plan that cannot work, with the key and the way out, before anything starts."""

from __future__ import annotations

from collections import Counter

from weft.config.errors import ConfigError
from weft.plan.plan import PipelinePlan, Plan


def validate_plan(plan: Plan, *, num_layers: int, global_batch: int) -> None:
    """Check a plan from any source against the job it is for.

    Raises:
        ConfigError: the first rule that the plan breaks.
    """
    if not plan.pipelines:
        raise ConfigError("pipelines", [], "at least one pipeline")
    _check_ranks(plan)
    for p, pipeline in enumerate(plan.pipelines):
        _check_pipeline(f"pipelines[{p}]", pipeline, num_layers)
    if plan.global_batch != global_batch:
        shares = [pipeline.samples for pipeline in plan.pipelines]
        raise ConfigError(
            "pipelines.samples",
            shares,
            f"shares that add up to batch.samples ({global_batch})",
            f"They add up to {plan.global_batch}.",
        )


def _check_ranks(plan: Plan) -> None:
    counts = Counter(rank for _, _, stage in plan.stages() for rank in stage.mesh.ranks)
    twice = sorted(rank for rank, times in counts.items() if times > 1)
    if twice:
        raise ConfigError("stages.mesh.ranks", twice, "every rank in one stage only")
    world = sum(counts.values())
    missing = sorted(set(range(world)) - set(counts))
    if missing:
        expected = f"the ranks 0 to {world - 1}, each once"
        raise ConfigError("stages.mesh.ranks", sorted(counts), expected, f"Missing: {missing}.")


def _check_pipeline(where: str, pipeline: PipelinePlan, num_layers: int) -> None:
    if pipeline.samples < 1 or pipeline.microbatch < 1:
        value = {"samples": pipeline.samples, "microbatch": pipeline.microbatch}
        raise ConfigError(where, value, "at least 1 of each")
    expected = 0
    for s, stage in enumerate(pipeline.stages):
        first, last = stage.layers
        if first != expected or last < first:
            key = f"{where}.stages[{s}].layers"
            raise ConfigError(key, [first, last], f"a range that starts at layer {expected}")
        expected = last
    if expected != num_layers:
        layers = [list(stage.layers) for stage in pipeline.stages]
        raise ConfigError(f"{where}.stages.layers", layers, f"all {num_layers} layers, each once")
    if len(pipeline.stages) != 1 or any(
        s.mesh.size(a) > 1 for s in pipeline.stages for a in ("tp", "cp")
    ):
        raise ConfigError(
            where,
            f"{len(pipeline.stages)} stages",
            "one stage split along dp alone",
            "Pipelines of several stages and tensor parallelism are not run by this version.",
        )

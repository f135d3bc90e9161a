"""Refuse ZeRO where there is nothing to divide: it needs ranks that hold the same parameters."""

from __future__ import annotations

from weft.config.errors import ConfigError
from weft.plan.plan import PipelinePlan, Plan


def refuse_idle_zero(plan: Plan, *, tied: bool) -> None:
    """``tied``: the model's head multiplies by the embedding's weight.

    Raises:
        ConfigError: a stage whose level changes nothing.
    """
    levels = _levels(plan)
    for p, s, stage in plan.stages():
        if not stage.zero:
            continue
        pipeline = plan.pipelines[p]
        key = f"pipelines[{p}].stages[{s}].zero"
        mates = (t for t, other in enumerate(pipeline.stages) if other.mesh == stage.mesh)
        held = [part for t in mates for part in _parts(pipeline, t)]
        most = max((levels[part] for part in held), default=0)
        if not held or (len(plan.pipelines) == len(stage.mesh.ranks) == 1):
            if tied and _is_end(pipeline, s):
                continue
            hint = "No other rank holds the parameters of this stage."
            raise ConfigError(key, stage.zero, "0", hint)
        if most < stage.zero:
            hint = "Parameters are kept at the lowest level of the stages that hold them."
            expected = f"at most {most}, the level of the other pipelines' stages for these layers"
            raise ConfigError(key, stage.zero, expected, hint)


def _levels(plan: Plan) -> dict[int, int]:
    """The lowest level at which each part of the model is held."""
    levels: dict[int, int] = {}
    for p, s, stage in plan.stages():
        for part in _parts(plan.pipelines[p], s):
            levels[part] = min(stage.zero, levels.get(part, stage.zero))
    return levels


def _parts(pipeline: PipelinePlan, stage: int) -> list[int]:
    """Layers of a stage; the embedding counts as layer -1, the head as the one after the last."""
    last = len(pipeline.stages) - 1
    low, high = pipeline.stages[stage].layers
    return list(range(low - (stage == 0), high + (stage == last)))


def _is_end(pipeline: PipelinePlan, stage: int) -> bool:
    """An end of the model that a rank of its own holds, apart from the other end."""
    first, last = pipeline.stages[0], pipeline.stages[-1]
    return stage in (0, len(pipeline.stages) - 1) and first.mesh != last.mesh

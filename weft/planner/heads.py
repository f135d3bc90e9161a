"""What a plan that divides the head's rows over positions must keep to."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod
from operator import add

from weft.config.axes import MODEL_AXES
from weft.config.errors import ConfigError
from weft.plan.plan import PipelinePlan, Plan
from weft.plan.tiling import split_by_weight

WAY_OUT = "Without head_rows the last stage has the whole head."


def check_heads(plan: Plan, rows: int) -> None:
    """Refuse parts of a head that do not make a whole one, or that something else does not know.

    ``rows``: of the head; 0 where it stays whole.

    Raises:
        ConfigError: the first rule that is broken.
    """
    for p, pipeline in enumerate(plan.pipelines):
        where = f"pipelines[{p}].stages"
        _check_order(where, pipeline)
        if pipeline.heads and not rows:
            hint = "The head of this model stays whole: it is the embedding's table, or its family "
            hint += "does not say how to divide it."
            key = f"{where}[{pipeline.num_chained}].head_rows"
            raise ConfigError(key, _rows(pipeline)[0], "null", f"{hint} {WAY_OUT}")
        _check_rows(where, pipeline, rows)
        _check_stages(where, pipeline)
        for key, said in (
            ("domains", plan.domains),
            ("state_shares", plan.has_unlike_state),
            ("border", any(stage.border for stage in pipeline.stages)),
        ):
            if pipeline.heads and said:
                hint = f"Parts of the head are for plans without {key}. {WAY_OUT}"
                raise ConfigError(f"{where}.head_rows", _rows(pipeline), "null", hint)


def with_head_rows(plan: Plan, rows: int) -> Plan:
    """The same for a head of so many rows: parts as large beside one another as they were, and no
    rank without any."""

    def fitted(pipeline: PipelinePlan) -> PipelinePlan:
        parts = [stage for stage in pipeline.stages if stage.head_rows]
        least = [prod(stage.mesh.size(axis) for axis in MODEL_AXES) for stage in parts]
        sizes = [high - low for low, high in _rows(pipeline)]
        more = split_by_weight(rows - sum(least), sizes) if parts else []
        ends = accumulate(map(add, least, more), initial=0)
        fitting = (
            replace(s, head_rows=ends) for s, ends in zip(parts, pairwise(ends), strict=True)
        )
        return replace(pipeline, stages=(*pipeline.stages[: pipeline.num_chained], *fitting))

    return replace(plan, pipelines=tuple(map(fitted, plan.pipelines)))


def _rows(pipeline: PipelinePlan) -> list[list[int]]:
    return [list(stage.head_rows) for stage in pipeline.stages if stage.head_rows is not None]


def _check_order(where: str, pipeline: PipelinePlan) -> None:
    """Parts of the head come last."""
    for s, stage in enumerate(pipeline.stages):
        if stage.head_rows is not None and s not in pipeline.heads:
            expected = "null on every stage that another without them follows"
            raise ConfigError(f"{where}[{s}].head_rows", list(stage.head_rows), expected, WAY_OUT)


def _check_rows(where: str, pipeline: PipelinePlan, rows: int) -> None:
    """Every row is in one part."""
    begin = 0
    for s, (low, high) in zip(pipeline.heads, _rows(pipeline), strict=True):
        if low != begin or high <= low:
            expected = f"a range of at least one row that starts at row {begin}"
            raise ConfigError(f"{where}[{s}].head_rows", [low, high], expected)
        begin = high
    if pipeline.heads and begin != rows:
        expected = f"all {rows} rows of the head, each once"
        hint = "There is one for each token of the vocabulary."
        raise ConfigError(f"{where}.head_rows", _rows(pipeline), expected, hint)
    if len(pipeline.heads) == 1:
        raise ConfigError(f"{where}.head_rows", _rows(pipeline), "several parts", WAY_OUT)


def _check_stages(where: str, pipeline: PipelinePlan) -> None:
    """They are parts of the head, and nothing else, on meshes that have layers."""
    meshes = {stage.mesh for stage in pipeline.stages[: pipeline.num_chained]}
    for s in pipeline.heads:
        stage = pipeline.stages[s]
        if stage.mesh not in meshes:
            expected = "the mesh of a stage without head_rows, and of one part of the head at most"
            raise ConfigError(f"{where}[{s}].mesh.ranks", list(stage.mesh.ranks), expected)
        meshes.remove(stage.mesh)
        for name, value, only in (
            ("layers", [*stage.layers], [stage.layers[1]] * 2),
            ("passes", stage.passes, 1),
            ("pieces", stage.pieces, 1),
            ("head_ways", stage.head_ways, 1),
            ("expert_pieces", stage.expert_pieces, 1),
            ("scores", stage.scores, "blocks"),
            ("mesh.cp", stage.mesh.size("cp"), 1),
        ):
            if value != only:
                hint = "A part of the head has no layers, and computes with whole samples at once."
                raise ConfigError(f"{where}[{s}].{name}", value, f"{only} with head_rows", hint)

"""The pipelines and stages that a configuration asks for -> a plan: which layers, which ranks.

Ranks are given out in the order in which stages are written, from 0. One process for each share is
the special case of pipelines of one stage on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import floor

from weft.config.axes import NAMES
from weft.config.batch import Batch
from weft.config.errors import ConfigError
from weft.config.plan_sections import MADE, PipelineConfig, PlanConfig, StageConfig
from weft.plan.borders import Place, place
from weft.plan.mesh import Mesh
from weft.plan.plan import DEFAULT_SCHEDULE, PipelinePlan, Plan, StagePlan, ZeroLevel
from weft.plan.tiling import split_by_weight, split_evenly
from weft.planner.validate import check_in_flight, refuse_idle_work
from weft.schedules.registry import SCHEDULES

Computes = Callable[[StageConfig, StagePlan], StagePlan]
"""Puts in how a stage computes: its device, precision and so on."""

_ZERO: tuple[ZeroLevel, ...] = (0, 1, 2, 3)


def pipelines_of(plan: PlanConfig, shares: Sequence[int]) -> tuple[PipelineConfig, ...]:
    """What is asked for, whichever way it was said."""
    if plan.pipelines is not None:
        return plan.pipelines
    if plan.stages is not None:
        said = {"in_flight": plan.in_flight, "head": plan.head}
        return (PipelineConfig(stages=plan.stages, **said),)
    return tuple(PipelineConfig(share=share, stages=(StageConfig(),)) for share in shares)


def made_of(plan: PlanConfig) -> set[int]:
    """Numbers of the pipelines whose order is to be made, which are laid out as by default: one
    stage a mesh, or interleaved where there are several."""
    several = [(p, each) for p, each in enumerate(pipelines_of(plan, ())) if len(each.stages) > 1]
    return {p for p, asked in several if (asked.schedule or plan.schedule) == MADE}


def staged_plan(
    plan: PlanConfig,
    pipelines: Sequence[PipelineConfig],
    batch: Batch,
    num_layers: int,
    computes: Computes,
    *,
    head_rows: int = 0,
) -> Plan:
    """The plan for ``pipelines``, which are what ``pipelines_of`` gave.

    ``head_rows``: of the model, where several meshes may divide them.

    Raises:
        ConfigError: they cannot be laid out, or say something that would have no effect.
    """
    _refuse_idle_keys(plan, pipelines)
    first_rank = 0
    built = []
    for number, asked in enumerate(pipelines):
        where = "plan." if plan.pipelines is None else f"plan.pipelines[{number}]."
        _refuse_on_one_stage(asked, where)
        layout = _layout(plan, asked, where)
        samples = asked.share * batch.accumulation * batch.micro
        micro = asked.micro or batch.micro
        if micro > samples > 0:
            raise ConfigError(f"{where}micro", micro, f"at most the samples it takes ({samples})")
        counts = _layer_counts(asked.stages, layout, num_layers, where)
        _refuse_without_effect(asked.stages, layout, counts, micro, where)
        laid = zip(layout.meshes, _stages(asked, layout, counts, first_rank), strict=True)
        stages = tuple(computes(asked.stages[mesh], stage) for mesh, stage in laid)
        first_rank += sum(stage.num_ranks for stage in asked.stages)
        _refuse_beside_head(plan, asked, f"{where}head")
        stages += tuple(_head_parts(asked.head, stages, head_rows, f"{where}head"))
        pipeline = PipelinePlan(
            stages=stages, samples=samples, microbatch=micro, schedule=layout.schedule
        )
        built.append(_with_in_flight(pipeline, asked.in_flight, where))
    return Plan(num_layers=num_layers, pipelines=tuple(built))


def _refuse_beside_head(plan: PlanConfig, asked: PipelineConfig, key: str) -> None:
    """What parts of a head do not know, by the keys that say it."""
    if asked.head is None:
        return
    unlike = any(stage.state_shares for stage in asked.stages)
    beside = {"domains": plan.domains, "border": plan.border, "state_shares": unlike or None}
    for name in (name for name, value in beside.items() if value is not None):
        hint = f"Parts of the head are for plans without {name}. null: the last has the whole head."
        raise ConfigError(key, list(asked.head), "null", hint)


def _head_parts(
    weights: Sequence[int] | None, stages: Sequence[StagePlan], rows: int, key: str
) -> Iterator[StagePlan]:
    """Stages that divide the rows of the head by the weights of meshes."""
    if weights is None:
        return
    firsts = {stage.mesh: stage for stage in reversed(stages)}
    meshes = list(dict.fromkeys(stage.mesh for stage in stages))
    if len(weights) != len(meshes) or len(weights) - weights.count(0) < 2:
        expected = f"a number for each of {len(meshes)} meshes, two or more above 0"
        raise ConfigError(key, list(weights), expected, "null: the last has the whole head.")
    if not rows:
        hint = "The head of this model is the embedding's table, or its family keeps it whole."
        raise ConfigError(key, list(weights), "null", hint)
    sizes = split_by_weight(rows, weights)
    if any(weight and not size for weight, size in zip(weights, sizes, strict=True)):
        expected = f"weights with which each above 0 has one of {rows} rows"
        raise ConfigError(key, list(weights), expected)
    for mesh, rows_of_mesh in zip(meshes, pairwise(accumulate([0, *sizes])), strict=True):
        if rows_of_mesh[1] > rows_of_mesh[0]:
            yield head_part(firsts[mesh], stages[-1].layers[1], rows_of_mesh)


def head_part(beside: StagePlan, num_layers: Place, rows: tuple[int, int]) -> StagePlan:
    """A part of the head on the mesh of another stage."""
    part = replace(beside, layers=(num_layers, num_layers), head_rows=rows, recompute="off")
    part = replace(part, compile=False, passes=1, pieces=1)
    part = replace(part, expert_ways=0, expert_pieces=1, expert_cast="", expert_cast_between="")
    return replace(part, head_ways=1, scores="blocks")


def _with_in_flight(
    pipeline: PipelinePlan, asked: tuple[int, ...] | None, where: str
) -> PipelinePlan:
    if asked is None:
        return pipeline
    deeper = replace(pipeline, in_flight=asked)
    check_in_flight(f"{where}in_flight", deeper)
    return deeper


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a schedule lays stages over meshes."""

    schedule: str
    chunks: int
    """Stages on each mesh."""
    meshes: tuple[int, ...]
    """Number of the mesh that holds each stage, in the order of the model."""


def _layout(plan: PlanConfig, asked: PipelineConfig, where: str) -> _Layout:
    count = len(asked.stages)
    if count == 1:
        return _Layout(DEFAULT_SCHEDULE, 1, (0,))
    said = schedule = asked.schedule or plan.schedule or DEFAULT_SCHEDULE
    if said == MADE:
        _refuse_beside_made(asked, where)
        schedule = _with_chunks()[0] if asked.chunks or plan.chunks else DEFAULT_SCHEDULE
    chunks = _chunks(plan, asked, where, schedule, said)
    positions = SCHEDULES[schedule].placement(count, chunks * count)
    mesh_of = {stage: mesh for mesh, stages in enumerate(positions) for stage in stages}
    return _Layout(schedule, chunks, tuple(mesh_of[stage] for stage in range(chunks * count)))


def _with_chunks() -> list[str]:
    """Schedules that may have several stages on each mesh, as many as one likes."""
    return [name for name, known in SCHEDULES.items() if known.any_chunks]


def _chunks(plan: PlanConfig, asked: PipelineConfig, where: str, schedule: str, said: str) -> int:
    """Stages on each mesh of a pipeline of several; ``said``: the schedule that is asked for."""
    if not SCHEDULES[schedule].any_chunks:
        if asked.chunks is not None:
            expected = f'null with the schedule "{schedule}"'
            raise ConfigError(f"{where}chunks", asked.chunks, expected)
        return SCHEDULES[schedule].chunks
    chunks = asked.chunks or plan.chunks or SCHEDULES[schedule].chunks
    if chunks == 1:
        key = "plan.chunks" if asked.chunks is None else f"{where}chunks"
        hint = f'With one stage on each mesh, "{DEFAULT_SCHEDULE}" is the same.'
        if said == MADE:
            hint = "With null each mesh has one stage."
        raise ConfigError(key, chunks, f'at least 2 with the schedule "{said}"', hint)
    return chunks


def _stages(
    asked: PipelineConfig, layout: _Layout, counts: Sequence[Place], first_rank: int
) -> Iterator[StagePlan]:
    """The stages in the order of the model, on consecutive ranks for each mesh."""
    meshes = []
    for stage in asked.stages:
        ranks = range(first_rank, first_rank + stage.num_ranks)
        sizes = {axis: size for axis, size in stage.axes.items() if size > 1}
        mesh = Mesh.of(ranks, **(sizes or {NAMES[0]: 1}))
        meshes.append(mesh.with_shares(**stage.shares))
        first_rank = ranks.stop
    ends = map(place, accumulate([0, *counts]))
    for m, layers in zip(layout.meshes, pairwise(ends), strict=True):
        stage = asked.stages[m]
        yield StagePlan(
            mesh=meshes[m],
            layers=layers,
            zero=_ZERO[stage.zero],
            passes=stage.passes,
            pieces=stage.pieces,
            head_ways=stage.head_ways,
            expert_ways=stage.expert_ways,
            expert_pieces=stage.expert_pieces,
            expert_cast=stage.expert_cast or "",
            expert_cast_between=stage.expert_cast_between or "",
            scores=stage.scores,
            sample_shares=stage.sample_shares or (),
            state_shares=stage.state_shares or (),
        )


def _layer_counts(
    stages: Sequence[StageConfig], layout: _Layout, num_layers: int, where: str
) -> list[Place]:
    """Layers of each stage in the order of the model."""
    given = [
        _given_layers(stage, f"{where}stages[{m}]", layout.chunks) for m, stage in enumerate(stages)
    ]
    totals = [None if layers is None else sum(layers) for layers in given]
    said = sum(filter(None, totals))
    num_unsaid = totals.count(None)
    if said > num_layers or (said < num_layers and not num_unsaid):
        expected = f"layers that add up to the model's {num_layers}"
        hint = f"They add up to {said}; a stage whose layers are null takes what is left."
        raise ConfigError(f"{where}stages", {"layers": totals}, expected, hint)
    rest = iter(_evenly(num_layers - said, num_unsaid) if num_unsaid else ())
    by_mesh = [
        iter(_evenly(next(rest), layout.chunks) if layers is None else layers) for layers in given
    ]
    return [next(by_mesh[m]) for m in layout.meshes]


def _evenly(layers: Place, ways: int) -> list[Place]:
    """Whole layers as evenly as they can be; the last has a half more where one is cut."""
    *others, last = split_evenly(floor(layers), ways)
    return [*others, place(last + layers % 1)]


def _given_layers(stage: StageConfig, key: str, chunks: int) -> Sequence[Place] | None:
    """Layers of each stage of one mesh, as far as they are said."""
    if stage.split is None:
        return None if stage.layers is None else _evenly(stage.layers, chunks)
    if stage.layers is not None:
        raise ConfigError(f"{key}.layers", stage.layers, "null beside split", "split adds up.")
    if chunks == 1:
        hint = "The schedule gives each mesh one stage: use layers."
        raise ConfigError(f"{key}.split", stage.split, "null", hint)
    if len(stage.split) != chunks:
        expected = f"{chunks} numbers, one for each stage of the mesh"
        raise ConfigError(f"{key}.split", stage.split, expected)
    return stage.split


def _refuse_without_effect(
    stages: Sequence[StageConfig], layout: _Layout, counts: Sequence[Place], micro: int, where: str
) -> None:
    for m, stage in enumerate(stages):
        key = f"{where}stages[{m}]"
        check_order(dict(stage)["order"], stage.axes, f"{key}.order")
        shares = stage.sample_shares or ()
        refuse_idle_work((key, f"{key}.passes"), stage.axes, stage.passes, micro, shares)
        held = sum(count for mesh, count in zip(layout.meshes, counts, strict=True) if mesh == m)
        for name in ("recompute", "compile"):
            value = dict(stage)[name]
            if not held and value not in (None, "off", False):
                expected = "null on a stage without layers"
                raise ConfigError(f"{key}.{name}", value, expected, "It is for layers alone.")
        for name, usual in _OF_LAYERS:
            value = dict(stage)[name]
            if not held and value != usual:
                hint = "It is for layers alone."
                expected = f"{usual} on a stage without layers"
                raise ConfigError(f"{key}.{name}", value, expected, hint)


_OF_LAYERS = (("pieces", 1), ("head_ways", 1), ("expert_pieces", 1), ("scores", "blocks"))
"""What says how layers compute, and what is usual."""


def check_order(order: Sequence[str] | None, sizes: Mapping[str, int], key: str) -> None:
    """It names every axis of several ranks, and none twice.

    Raises:
        ConfigError: it does not.
    """
    if order is None:
        return
    several = [axis for axis, size in sizes.items() if size > 1]
    if len(several) < 2:
        expected = "null where no two axes are above 1"
        raise ConfigError(key, list(order), expected, "There is nothing to order.")
    left_out = [axis for axis in several if axis not in order]
    if left_out:
        words = ", ".join(f"{axis} = {sizes[axis]}" for axis in left_out)
        raise ConfigError(key, list(order), "every axis above 1", f"Not named: {words}.")
    if len(set(order)) < len(order):
        raise ConfigError(key, list(order), "every axis once")


def _refuse_on_one_stage(asked: PipelineConfig, where: str) -> None:
    for name in ("schedule", "chunks", "in_flight", "head"):
        value = dict(asked)[name]
        if value is not None and len(asked.stages) == 1:
            hint = "It is for several stages."
            raise ConfigError(f"{where}{name}", value, "null for a pipeline of one stage", hint)


def _refuse_beside_made(asked: PipelineConfig, where: str) -> None:
    for name, hint in (
        ("in_flight", "It is made too."),
        ("head", "No order is made for parts of the head."),
    ):
        value = dict(asked)[name]
        if value is not None:
            raise ConfigError(f"{where}{name}", value, f'null with the schedule "{MADE}"', hint)


def _refuse_idle_keys(plan: PlanConfig, pipelines: Sequence[PipelineConfig]) -> None:
    """A schedule needs several stages, and chunks a schedule that uses them."""
    several = [pipeline for pipeline in pipelines if len(pipeline.stages) > 1]
    if plan.schedule is not None and all(pipeline.schedule for pipeline in several):
        expected = "null where no pipeline of several stages is left to it"
        hint = "Leave it out, or write plan.schedule=null where a recipe has it."
        raise ConfigError("plan.schedule", plan.schedule, expected, hint)
    schedules = [pipeline.schedule or plan.schedule for pipeline in several if not pipeline.chunks]
    with_chunks = [*_with_chunks(), MADE]
    if plan.chunks is not None and not set(with_chunks) & set(schedules):
        names = " or ".join(f'"{name}"' for name in with_chunks)
        expected = f"null where no schedule {names} is left to it"
        raise ConfigError("plan.chunks", plan.chunks, expected)

"""The schedules by name, and what each says of itself to runtime, simulator and planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.config.names import Registry
from weft.plan.plan import PipelinePlan
from weft.schedules.action import Action
from weft.schedules.head_parts import with_heads
from weft.schedules.notation import read

Placement = Callable[[int, int], list[tuple[int, ...]]]
"""(meshes, stages) -> the stages that each mesh holds."""


def one_each(num_positions: int, num_stages: int) -> list[tuple[int, ...]]:  # noqa: ARG001
    """One stage on each mesh, in order."""
    return [(stage,) for stage in range(num_stages)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSchedule:
    """One file in ``weft/schedules`` holds one of these as ``SCHEDULE``."""

    name: str
    order: int
    """Place where schedules are listed."""
    preference: int
    """The planner's choice among plans that take as long: the lowest."""
    actions: Callable[[int, int, int], list[list[Action]]]
    """(meshes, stages, microbatches) -> for each mesh its actions in order."""
    deeper: Callable[[Sequence[int], int], list[list[Action]]] | None = None
    """(in flight at each mesh, microbatches) -> likewise with as many in flight; None: it is made
    for one number of them."""
    placement: Placement = one_each
    splits_backward: bool = False
    """Backward is done in halves: weight gradients wait for actions of their own."""
    chunks: int = 1
    """Stages on each mesh."""
    any_chunks: bool = False
    """It can have more of them; ``chunks`` is for who does not say."""
    holds_every_microbatch: bool = False
    """What a mesh holds grows with the number of microbatches."""
    receives_as_proven: bool = False
    """Of its lists no receive ever holds up another, whatever their shape: what comes over borders
    is counted without playing them."""


SCHEDULES: Registry[PipelineSchedule] = Registry(
    PipelineSchedule, "weft.schedules", entry="SCHEDULE", group="weft.schedules"
)
"""Every file beside this one that has a ``SCHEDULE``, and those of installed packages."""


def schedule_of(pipeline: PipelinePlan) -> list[list[Action]]:
    """The actions of every position of a pipeline, as its plan names them."""
    shape = len(pipeline.positions()), pipeline.num_chained, pipeline.num_microbatches
    return actions_of(
        pipeline.schedule,
        *shape,
        in_flight=pipeline.in_flight,
        lists=pipeline.lists,
        heads=head_positions(pipeline),
    )


def head_positions(pipeline: PipelinePlan) -> tuple[int, ...]:
    """At which position each part of the head is."""
    places = {n: p for p, held in enumerate(pipeline.positions()) for n in held}
    return tuple(places[number] for number in pipeline.heads)


def placed(name: str, meshes: int, stages: int, heads: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """The stages that each mesh holds: so many where the schedule wants them, and parts of the head
    at these positions."""
    places = SCHEDULES[name].placement(meshes, stages)
    parts = [[stages + n for n, at in enumerate(heads) if at == p] for p in range(len(places))]
    return [(*held, *more) for held, more in zip(places, parts, strict=True)]


def actions_of(
    name: str,
    meshes: int,
    stages: int,
    microbatches: int,
    *,
    in_flight: Sequence[int] = (),
    lists: Sequence[str] = (),
    heads: Sequence[int] = (),
) -> list[list[Action]]:
    """For each mesh the actions of a schedule in order, with so many microbatches in flight, or as
    lists of a plan say. ``heads``: the positions of parts of the head."""
    schedule, places = SCHEDULES[name], placed(name, meshes, stages, heads)
    if lists:
        return [read(text, held) for text, held in zip(lists, places, strict=True)]
    if not in_flight:
        found = schedule.actions(meshes, stages, microbatches)
    else:
        assert schedule.deeper is not None, f"{name} is made for one number, not {in_flight}"
        found = schedule.deeper(in_flight, microbatches)
    parts = range(stages, stages + len(heads))
    return with_heads(found, places, parts, microbatches) if heads else found


def expected_positions(pipeline: PipelinePlan) -> list[tuple[int, ...]]:
    """Where the schedule wants the stages: the numbers that each position must hold."""
    shape = len(pipeline.positions()), pipeline.num_chained
    return placed(pipeline.schedule, *shape, head_positions(pipeline))


def by_preference() -> tuple[str, ...]:
    """The names, in the order in which the planner prefers them among equals."""
    return tuple(s.name for s in sorted(SCHEDULES.values(), key=lambda s: s.preference))

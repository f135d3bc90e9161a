"""The schedules by name."""

from __future__ import annotations

from weft.config.names import Registry
from weft.plan.plan import PipelinePlan
from weft.schedules.action import Action
from weft.schedules.pipeline_schedule import PipelineSchedule

SCHEDULES: Registry[PipelineSchedule] = Registry(
    "weft.schedules", entry="SCHEDULE", group="weft.schedules"
)
"""Every file beside this one that has a ``SCHEDULE``, and those of installed packages."""


def schedule_of(pipeline: PipelinePlan) -> list[list[Action]]:
    """The actions of every position of a pipeline, as its plan names them."""
    positions, stages = len(pipeline.positions()), len(pipeline.stages)
    return schedule_named(pipeline.schedule, positions, stages, pipeline.num_microbatches)


def schedule_named(
    name: str, num_positions: int, num_stages: int, num_microbatches: int
) -> list[list[Action]]:
    """The actions of every position, under the schedule of this name."""
    return SCHEDULES[name].actions(num_positions, num_stages, num_microbatches)


def splits_backward(name: str) -> bool:
    """The schedule does backward in halves: weight gradients wait for actions of their own."""
    return SCHEDULES[name].splits_backward


def expected_positions(pipeline: PipelinePlan) -> list[tuple[int, ...]]:
    """Where the schedule wants the stages: the numbers that each position must hold."""
    return positions_of(pipeline.schedule, len(pipeline.positions()), len(pipeline.stages))


def positions_of(name: str, num_positions: int, num_stages: int) -> list[tuple[int, ...]]:
    """The stages that each position holds under the schedule of this name."""
    return SCHEDULES[name].placement(num_positions, num_stages)


def chunks_of(name: str) -> int:
    """Stages on each position under the schedule of this name, where nobody says how many."""
    return SCHEDULES[name].chunks


def by_preference() -> tuple[str, ...]:
    """The names, in the order in which the planner prefers them among equals."""
    return tuple(sorted(SCHEDULES, key=lambda name: SCHEDULES[name].preference))

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
    meshes, stages = len(pipeline.positions()), len(pipeline.stages)
    return SCHEDULES[pipeline.schedule].actions(meshes, stages, pipeline.num_microbatches)


def expected_positions(pipeline: PipelinePlan) -> list[tuple[int, ...]]:
    """Where the schedule wants the stages: the numbers that each position must hold."""
    meshes, stages = len(pipeline.positions()), len(pipeline.stages)
    return SCHEDULES[pipeline.schedule].placement(meshes, stages)


def by_preference() -> tuple[str, ...]:
    """The names, in the order in which the planner prefers them among equals."""
    return tuple(sorted(SCHEDULES, key=lambda name: SCHEDULES[name].preference))

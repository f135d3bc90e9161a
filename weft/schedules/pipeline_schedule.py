"""What a pipeline schedule says of itself, for the runtime, the simulator and the planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.schedules.action import Action

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
    placement: Placement = one_each
    splits_backward: bool = False
    """Backward is done in halves: weight gradients wait for actions of their own."""
    chunks: int = 1
    """Stages on each mesh."""
    any_chunks: bool = False
    """It can have more of them; ``chunks`` is for who does not say."""
    holds_every_microbatch: bool = False
    """What a mesh holds grows with the number of microbatches."""

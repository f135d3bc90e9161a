"""GPipe (arXiv 1811.06965): all forwards, then all backwards."""

from __future__ import annotations

from weft.schedules.action import Action
from weft.schedules.registry import PipelineSchedule


def gpipe(num_positions: int, num_microbatches: int) -> list[list[Action]]:
    """One stage a position. Every position holds all microbatches at the turn."""
    microbatches = range(num_microbatches)
    return [
        [Action("F", s, m) for m in microbatches] + [Action("B", s, m) for m in microbatches]
        for s in range(num_positions)
    ]


SCHEDULE = PipelineSchedule(
    name="gpipe",
    order=0,
    preference=2,
    receives_as_proven=True,
    actions=lambda meshes, _, microbatches: gpipe(meshes, microbatches),
    holds_every_microbatch=True,
)

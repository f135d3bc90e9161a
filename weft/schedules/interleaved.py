"""Interleaved 1F1B (arXiv 2104.04473): several stages a position, visited in rounds."""

from __future__ import annotations

from weft.schedules.action import Action
from weft.schedules.greedy import Position, play
from weft.schedules.registry import PipelineSchedule


def in_rounds(num_positions: int, num_stages: int) -> list[tuple[int, ...]]:
    """Position ``p`` holds stages ``p``, ``p + num_positions``, and so on."""
    return [tuple(range(p, num_stages, num_positions)) for p in range(num_positions)]


def interleaved(
    num_positions: int, num_microbatches: int, num_chunks: int = 2
) -> list[list[Action]]:
    """Position ``p`` holds stages ``p``, ``p + num_positions``, ... ``num_chunks`` of them.

    Forwards take ``num_positions`` microbatches through the first chunk, then the same through
    the next; backwards likewise from the last chunk. The last group may be smaller, so any number
    of microbatches will do.
    """
    stages_of = in_rounds(num_positions, num_positions * num_chunks)
    groups = [
        range(low, min(low + num_positions, num_microbatches))
        for low in range(0, num_microbatches, num_positions)
    ]

    forward = [
        [Action("F", s, m) for g in groups for s in stages for m in g] for stages in stages_of
    ]
    backward = [
        [Action("B", s, m) for g in groups for s in stages[::-1] for m in g] for stages in stages_of
    ]

    def wishes(position: Position) -> list[Action]:
        forwards, backwards = position.totals["F"], position.totals["B"]
        ahead = 2 * (num_positions - position.number - 1) + (num_chunks - 1) * num_positions + 1
        wanted = backward[position.number][backwards : backwards + 1]
        if forwards - backwards < ahead:
            return forward[position.number][forwards : forwards + 1] + wanted
        return wanted

    return play(stages_of, num_microbatches, wishes, split=False)


SCHEDULE = PipelineSchedule(
    name="interleaved",
    order=2,
    preference=3,
    receives_as_proven=True,
    actions=lambda meshes, stages, many: interleaved(meshes, many, stages // meshes),
    placement=in_rounds,
    chunks=2,
    any_chunks=True,
)

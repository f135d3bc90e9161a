"""Put the work of the head's parts between the other actions of a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.schedules.action import Action, Kind
from weft.schedules.greedy import Position, play


def with_heads(
    schedule: Sequence[Sequence[Action]],
    places: Sequence[tuple[int, ...]],
    heads: Sequence[int],
    num_microbatches: int,
) -> list[list[Action]]:
    """The schedule of a pipeline whose last stages are parts of the head.

    Each is computed as soon as it can be: whoever has the layers before them waits for all.
    ``schedule``: of the stages before. ``places``: the stages of each position, these among them;
    ``heads``: their numbers.
    """
    split = any(action.kind == "I" for actions in schedule for action in actions)
    kinds: tuple[Kind, ...] = ("W", "I", "F") if split else ("B", "F")

    def wishes(position: Position) -> Iterator[Action]:
        parts = [stage for stage in position.stages if stage in heads]
        for kind in kinds:
            for part in parts:
                yield from position.next(kind, part)
        done = len(position.done) - sum(position.counts[k, part] for k in kinds for part in parts)
        yield from schedule[position.number][done : done + 1]

    return play(places, num_microbatches, wishes, split=split, heads=len(heads))

"""ZB-V (arXiv 2405.15362): two stages a position, laid out as a V, with the memory of 1F1B."""

from __future__ import annotations

from collections.abc import Iterator

from weft.schedules.action import Action
from weft.schedules.greedy import Position, play
from weft.schedules.registry import PipelineSchedule


def v_stages(num_positions: int) -> list[tuple[int, ...]]:
    """Position ``p`` holds stages ``p`` and ``2 num_positions - 1 - p``."""
    return [(p, 2 * num_positions - 1 - p) for p in range(num_positions)]


def zero_bubble_v(num_positions: int, num_microbatches: int) -> list[list[Action]]:
    """Every position holds at most ``2 num_positions`` microbatches of a stage, half as large each.

    Of what is ready, the end of the V comes first: it frees memory and feeds the others. On
    either way forwards come before input gradients, so that a position nearer to the turn of the
    V does not wait for those that begin later.
    """

    def wishes(position: Position) -> Iterator[Action]:
        down, up = position.stages
        held = position.totals["F"] - position.totals["W"]
        # Room is kept for the way back up of everything on its way down.
        turning = position.counts["F", down] - position.counts["W", up]
        has_room = held < 2 * num_positions
        if has_room:
            yield from position.next("F", up)
        yield from position.next("I", up)
        if has_room and turning < num_positions:
            yield from position.next("F", down)
        yield from position.next("I", down)
        yield from position.next("W", up)
        yield from position.next("W", down)

    return play(v_stages(num_positions), num_microbatches, wishes, split=True)


SCHEDULE = PipelineSchedule(
    name="zb-v",
    order=4,
    preference=4,
    receives_as_proven=True,
    actions=lambda meshes, _, microbatches: zero_bubble_v(meshes, microbatches),
    placement=lambda meshes, _: v_stages(meshes),
    splits_backward=True,
    chunks=2,
)

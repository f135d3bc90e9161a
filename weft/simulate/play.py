"""Play a schedule in modelled time: the same lists of actions that the executor runs."""

from __future__ import annotations

from collections.abc import Sequence

from weft.cost.times import SeamTimes, StageTimes
from weft.plan.plan import PipelinePlan
from weft.schedules.action import Action, Schedule
from weft.schedules.known import Pattern, proven_order
from weft.schedules.validity import prove
from weft.simulate.tape import Tape, tape_of, write_tape
from weft.simulate.timeline import Span, Timeline


def simulate_plan(
    pipeline: PipelinePlan, stages: Sequence[StageTimes], seams: Sequence[SeamTimes]
) -> Timeline:
    """One step of a pipeline as planned; a smaller last microbatch takes less."""
    pattern = Pattern.of(pipeline)
    tape, sizes = tape_of(pattern), (1.0, last_size(pipeline.samples, pipeline.microbatch))
    return _timeline(proven_order(pattern), tape, stages, seams, sizes)


def simulate(
    schedule: Schedule,
    stages: Sequence[StageTimes],
    seams: Sequence[SeamTimes],
    sizes: Sequence[float],
) -> Timeline:
    """Every position does its list in order, each action as soon as all it needs is there.

    Args:
        stages: By stage number.
        seams: Between stages ``s`` and ``s + 1``. Stages of one position hand on for nothing.
        sizes: Of each microbatch, 1 for a full one.

    Raises:
        ValueError: the schedule never ends or misses something; see ``prove``.
    """
    assert len(seams) == len(stages) - 1, f"{len(seams)} seams between {len(stages)} stages"
    positions = [list(dict.fromkeys(action.stage for action in actions)) for actions in schedule]
    order = prove(schedule, positions, len(sizes))
    tape = write_tape(order, positions, range(len(sizes)))
    return _timeline(order, tape, stages, seams, sizes)


def last_size(samples: int, microbatch: int) -> float:
    """Of the last microbatch, as a part of a full one."""
    return ((samples - 1) % microbatch + 1) / microbatch


def _timeline(
    order: Sequence[Action],
    tape: Tape,
    stages: Sequence[StageTimes],
    seams: Sequence[SeamTimes],
    sizes: Sequence[float],
) -> Timeline:
    """Who did what when."""
    spans: list[list[Span]] = [[] for _ in range(tape.num_positions)]
    began, ended = tape.play(stages, seams, sizes)
    for action, place, start, end in zip(order, tape.position, began, ended, strict=True):
        spans[place].append(Span(action, start, end))
    return Timeline(tuple(tuple(row) for row in spans))

"""Play a schedule in modelled time: the same lists of actions that the executor runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.cost.times import BorderTimes, StageTimes
from weft.plan.plan import PipelinePlan
from weft.schedules.action import Action
from weft.schedules.known import Pattern, proven_order
from weft.simulate.tape import tape_of


class Span(NamedTuple):
    """One action and its time, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One step of a pipeline."""

    num_positions: int
    pattern: Pattern | None = None
    """None: it computes nothing."""
    began: Sequence[float] = ()
    """By row of the pattern's tape, in seconds from the start of the step."""
    ended: Sequence[float] = ()

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """For every position, what it does, in order."""
        found: list[list[Span]] = [[] for _ in range(self.num_positions)]
        if self.pattern is not None:
            tape = tape_of(self.pattern)
            for action, row in zip(proven_order(self.pattern), tape.rows, strict=True):
                span = Span(action, self.began[row], self.ended[row])
                found[tape.position[row]].append(span)
        return tuple(map(tuple, found))

    @cached_property
    def step_s(self) -> float:
        """Until the last action of all has ended."""
        return max(self.ended, default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """How long each position computes."""
        found = [0.0] * self.num_positions
        places = tape_of(self.pattern).position if self.pattern is not None else ()
        for place, start_s, end_s in zip(places, self.began, self.ended, strict=True):
            found[place] += end_s - start_s
        return tuple(found)

    @property
    def bubble(self) -> float:
        """Part of the positions' time in which they idle."""
        whole = self.step_s * self.num_positions
        return 1 - sum(self.busy_s) / whole if whole else 0.0


def simulate_plan(
    pipeline: PipelinePlan, stages: Sequence[StageTimes], borders: Sequence[BorderTimes]
) -> Timeline:
    """One step of a pipeline as planned; a smaller last microbatch takes less.

    Args:
        borders: As ``PipelinePlan.borders`` has them. Stages of one position hand on for nothing.
    """
    many = len(pipeline.positions())
    if not pipeline.samples:
        return Timeline(many)
    pattern, last = Pattern.of(pipeline), last_size(pipeline.samples, pipeline.microbatch)
    return Timeline(many, pattern, *tape_of(pattern).play(stages, borders, last))


def last_size(samples: int, microbatch: int) -> float:
    """Of the last microbatch, as a part of a full one."""
    return last_samples(samples, microbatch) / microbatch


def last_samples(samples: int, microbatch: int) -> int:
    """Of the last microbatch."""
    return (samples - 1) % microbatch + 1

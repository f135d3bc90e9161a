"""Play a schedule in modelled time: the same lists of actions that the executor runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.cost.times import BorderTimes, StageTimes
from weft.plan.plan import PipelinePlan
from weft.schedules.action import Action
from weft.schedules.known import Pattern, proven_order
from weft.simulate.tape import tape_of


@dataclass(frozen=True, slots=True)
class Span:
    """One action and its time, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of a pipeline."""

    spans: tuple[tuple[Span, ...], ...]
    """For every position, what it does, in order."""

    @property
    def step_s(self) -> float:
        """Until the last action of all has ended."""
        return max((row[-1].end_s for row in self.spans if row), default=0.0)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """How long each position computes."""
        return tuple(sum(span.end_s - span.start_s for span in row) for row in self.spans)

    @property
    def bubble(self) -> float:
        """Part of the positions' time in which they idle."""
        whole = self.step_s * len(self.spans)
        return 1 - sum(self.busy_s) / whole if whole else 0.0


def simulate_plan(
    pipeline: PipelinePlan, stages: Sequence[StageTimes], borders: Sequence[BorderTimes]
) -> Timeline:
    """One step of a pipeline as planned; a smaller last microbatch takes less.

    Args:
        borders: As ``PipelinePlan.borders`` has them. Stages of one position hand on for nothing.
    """
    if not pipeline.samples:
        return Timeline(((),) * len(pipeline.positions()))
    pattern = Pattern.of(pipeline)
    tape, last = tape_of(pattern), last_size(pipeline.samples, pipeline.microbatch)
    spans: list[list[Span]] = [[] for _ in range(tape.num_positions)]
    began, ended = tape.play(stages, borders, last)
    for action, row in zip(proven_order(pattern), tape.rows, strict=True):
        spans[tape.position[row]].append(Span(action, began[row], ended[row]))
    return Timeline(tuple(tuple(row) for row in spans))


def last_size(samples: int, microbatch: int) -> float:
    """Of the last microbatch, as a part of a full one."""
    return last_samples(samples, microbatch) / microbatch


def last_samples(samples: int, microbatch: int) -> int:
    """Of the last microbatch."""
    return (samples - 1) % microbatch + 1

"""Play a schedule in modelled time: the same lists of actions that the executor runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.plan.plan import PipelinePlan
from weft.schedules.action import Action, Need, Schedule, needs
from weft.schedules.registry import schedule_of
from weft.schedules.validity import prove
from weft.simulate.timeline import Span, Timeline
from weft.simulate.times import SeamTimes, StageTimes


def simulate_plan(
    pipeline: PipelinePlan, stages: Sequence[StageTimes], seams: Sequence[SeamTimes]
) -> Timeline:
    """One step of a pipeline as planned; a smaller last microbatch takes less."""
    full, samples = pipeline.microbatch, pipeline.samples
    sizes = [
        min(full, samples - number * full) / full for number in range(pipeline.num_microbatches)
    ]
    return simulate(schedule_of(pipeline), stages, seams, sizes)


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
    position_of = {action.stage: p for p, actions in enumerate(schedule) for action in actions}
    stages_of = [[s for s in position_of if position_of[s] == p] for p in range(len(schedule))]
    order = prove(schedule, stages_of, len(sizes)).order
    split = any(action.kind == "I" for action in order)
    wires = _Wires(seams, position_of, sizes)
    spans: list[list[Span]] = [[] for _ in schedule]
    ended: dict[Action, float] = {}
    for action in order:
        row = spans[position_of[action.stage]]
        before = needs(action, len(stages), split=split)
        ready = [wires.arrival(need, ended[need.action]) for need in before]
        start = max([row[-1].end_s if row else 0.0, *ready])
        end = start + stages[action.stage].of(action.kind) * sizes[action.microbatch]
        row.append(Span(action, start, end))
        ended[action] = end
        wires.send(action, end)
    return Timeline(tuple(tuple(row) for row in spans))


@dataclass(slots=True)
class _Wires:
    """Messages on their way between positions."""

    seams: Sequence[SeamTimes]
    position_of: dict[int, int]
    sizes: Sequence[float]
    _free_at: dict[tuple[int, int], float] = field(default_factory=dict)
    """When the wire from one stage to another has carried what it was given."""
    _arrived: dict[Action, float] = field(default_factory=dict)

    def send(self, action: Action, now: float) -> None:
        """Put an action's result on its wire. A position's results come in its order."""
        stage = action.stage
        target = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(action.kind, stage)
        if self.position_of.get(target) in (None, self.position_of[stage]):
            return
        seam = self.seams[min(stage, target)]
        leaves = max(now, self._free_at.get((stage, target), 0.0))
        passed = leaves + seam.transfer_s * self.sizes[action.microbatch]
        self._free_at[stage, target] = passed
        self._arrived[action] = passed + seam.latency_s

    def arrival(self, need: Need, ended: float) -> float:
        """When the result of a needed action, which ended at ``ended``, can be used."""
        return self._arrived.get(need.action, ended) if need.travels else ended

"""Do a schedule's actions with real stages: the one executor of every plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.nn.context import Context
from weft.parallel.gradients import Gradients
from weft.parallel.pipeline.deferred import Job, WeightWork
from weft.parallel.pipeline.releases import releases
from weft.parallel.pipeline.seam import Seam, Way
from weft.parallel.sharding import Attendance
from weft.plan.plan import Seat
from weft.precision.roles import PRECISIONS
from weft.schedules.action import Action, Schedule
from weft.schedules.registry import schedule_of

AHEAD = 2
"""Actions whose input is received while the one before them computes: at most as many more inputs
are held."""


class Stage(Protocol):
    """The modules of one stage, whatever the model."""

    def __call__(self, x: Tensor, context: Context, /) -> Tensor:
        """Tokens on the first stage, else what crossed the border, to what crosses the next."""

    def loss(self, hidden: Tensor, targets: Tensor, weights: Tensor, /) -> Tensor:
        """On the last stage: sum of weight times loss of one microbatch, a scalar."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """``tokens``, ``targets`` int64 and ``weights`` float, each ``[batch, seq]``."""

    tokens: Tensor
    targets: Tensor
    weights: Tensor
    context: Context


@dataclass(frozen=True, slots=True)
class _Work:
    """What a rank does in a step."""

    actions: Sequence[Action]
    arrived: Sequence[Sequence[Action]]
    """After each action: earlier ones whose results have certainly arrived where they went."""

    @staticmethod
    def of(schedule: Schedule, position: int) -> _Work:
        return _Work(schedule[position], releases(schedule, position))


@dataclass(slots=True)
class _Flight:
    """One microbatch on its way through one stage: what backward needs."""

    given: Tensor | None
    """The input that came over a seam; None on the first stage."""
    result: Tensor
    """The output, or on the last stage the loss."""


Border = tuple[int, ...] | Mapping[int, tuple[int, ...]]
"""Shape of what crosses a border, of one sample: of all alike, or by the stage before each."""


class Executor:
    """Forward and backward of one rank's stages over the microbatches of a step.

    Args:
        stages: This rank's modules by stage number.
        border: What crosses the borders between stages, of any rank; ranks of a
            tensor-parallel group hold parts of its first dimension. ``(seq_len, d_model)``
            for decoders.
        scale: Losses are divided by it before backward.
        work: Collects weight gradients where the schedule does backward in halves.
        attendances: By stage, what this rank does where it has no samples of a microbatch.
    """

    def __init__(
        self,
        seat: Seat,
        stages: Mapping[int, Stage],
        comm: Comm,
        gradients: Gradients,
        *,
        border: Border,
        scale: float,
        work: WeightWork | None = None,
        attendances: Mapping[int, Attendance] = MappingProxyType({}),
    ) -> None:
        self._seat = seat
        self._attendances = attendances
        self._stages = stages
        self._gradients = gradients
        self._scale = scale
        self._work = work
        schedule = schedule_of(seat.pipeline_plan)
        forwards = [[action for action in each if action.kind == "F"] for each in schedule]
        self._training = _Work.of(schedule, seat.position)
        self._evaluation = _Work.of(forwards, seat.position)
        self._dtype = PRECISIONS[seat.stage_plan.precision].compute.dtype
        self._counts_loss = seat.counts_samples
        last = len(seat.pipeline_plan.stages) - 1
        self._seams: dict[int, Seam] = {}
        for stage in range(last):
            if stage in stages or stage + 1 in stages:
                shape = border[stage] if isinstance(border, Mapping) else border
                self._seams[stage] = Seam(comm, seat.pipeline_plan, stage, shape)
        self._totals = torch.zeros(2, dtype=torch.float64, device=comm.device)
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._weight_jobs: dict[tuple[int, int], list[Job]] = {}

    def train(self, microbatches: Sequence[MicroBatch | None]) -> Tensor:
        """Every action of the schedule. This rank's sums ``[loss, weight]``, fp64.

        The result is overwritten by the next call; so is that of ``evaluate``.
        ``microbatches``: this rank's part of each, in order; None where its part is empty.
        """
        self._gradients.begin(sum(microbatch is not None for microbatch in microbatches))
        return self._run(self._training, microbatches, nullcontext())

    def evaluate(self, microbatches: Sequence[MicroBatch | None]) -> Tensor:
        """Forwards alone, without gradients."""
        return self._run(self._evaluation, microbatches, torch.no_grad())

    def _run(
        self,
        work: _Work,
        microbatches: Sequence[MicroBatch | None],
        mode: AbstractContextManager[None],
    ) -> Tensor:
        self._totals.zero_()
        expected = 0
        with mode:
            for number, action in enumerate(work.actions):
                for coming in work.actions[expected : number + AHEAD + 1]:
                    self._expect(coming, microbatches)
                expected = number + AHEAD + 1
                microbatch = microbatches[action.microbatch]
                if microbatch is not None:
                    self._do(action, microbatch)
                elif action.stage in self._attendances:
                    self._attend(action)
                for sent in work.arrived[number]:
                    self._release(sent)
        for seam in self._seams.values():
            seam.finish()
        return self._totals

    def _attend(self, action: Action) -> None:
        """No samples for this rank: help the others of the stage to theirs."""
        if action.kind == "F":
            self._attendances[action.stage].forward()
        elif action.kind != "W":
            self._attendances[action.stage].backward()

    def _expect(self, action: Action, microbatches: Sequence[MicroBatch | None]) -> None:
        """Start to receive what the action works on, where it comes over a seam."""
        if microbatches[action.microbatch] is None:
            return
        way: Way = "F" if action.kind == "F" else "B"
        seam = action.stage - 1 if way == "F" else action.stage
        if action.kind != "W" and seam in self._seams:
            self._seams[seam].expect(way, action.microbatch)

    def _release(self, action: Action) -> None:
        """Let go of what the action sent."""
        way: Way = "F" if action.kind == "F" else "B"
        self._seams[action.stage - (way == "B")].release(way, action.microbatch)

    def _do(self, action: Action, microbatch: MicroBatch) -> None:
        match action.kind:
            case "F":
                self._forward(action, microbatch)
            case "B" | "I":
                self._backward(action)
            case "W":
                self._weights(action)

    def _forward(self, action: Action, microbatch: MicroBatch) -> None:
        module = self._stages[action.stage]
        given = None
        if not self._seat.holds_embedding(action.stage):
            given = self._seams[action.stage - 1].receive("F", action.microbatch)
            given = given.to(self._dtype).requires_grad_(torch.is_grad_enabled())
        x = microbatch.tokens if given is None else given
        result: Tensor = module(x, microbatch.context)
        if self._seat.holds_head(action.stage):
            result = module.loss(result, microbatch.targets, microbatch.weights)
            if self._counts_loss:
                self._totals[0] += result.detach()
                self._totals[1] += microbatch.weights.sum(dtype=torch.float64)
        else:
            self._seams[action.stage].send("F", action.microbatch, result.detach())
        if torch.is_grad_enabled():
            self._flights[action.stage, action.microbatch] = _Flight(given, result)

    def _backward(self, action: Action) -> None:
        """The whole backward, or all but the linear layers' weight gradients."""
        key = (action.stage, action.microbatch)
        flight = self._flights.pop(key)
        if self._work is not None:
            self._work.is_deferring = action.kind == "I"
        if self._seat.holds_head(action.stage):
            (flight.result / self._scale).backward()  # type: ignore[no-untyped-call]
        else:
            grad = self._seams[action.stage].receive("B", action.microbatch)
            if flight.result.requires_grad:
                flight.result.backward(grad.to(flight.result.dtype))  # type: ignore[no-untyped-call]
        if self._work is not None:
            self._weight_jobs[key] = self._work.take()
        if flight.given is not None:
            assert flight.given.grad is not None
            self._seams[action.stage - 1].send("B", action.microbatch, flight.given.grad)

    @torch.no_grad()
    def _weights(self, action: Action) -> None:
        for param, make in self._weight_jobs.pop((action.stage, action.microbatch)):
            self._gradients.add(param, make())

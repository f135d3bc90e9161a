"""Do a schedule's actions with real stages: the one executor of every plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.memory import ReusedMemory
from weft.comm.spans import span
from weft.nn.stage import MicroBatch, Objective, Stage, Terms, added, total_of
from weft.parallel.gradients import Gradients
from weft.parallel.pipeline.deferred import Job, WeightWork
from weft.parallel.pipeline.running import RunningBuffers
from weft.parallel.pipeline.stage_border import StageBorder, Way
from weft.parallel.sharding import Attendance
from weft.plan.layout import Border
from weft.plan.plan import RankPlan
from weft.precision.registry import PRECISIONS
from weft.schedules.action import Action, Schedule
from weft.schedules.clocks import Clocks
from weft.schedules.receives import receives
from weft.schedules.registry import schedule_of
from weft.schedules.releases import releases


@dataclass(slots=True)
class _Kept:
    """One microbatch on its way through one stage: what backward needs."""

    given: Mapping[str, Tensor]
    """What came over a stage border and wants a gradient."""
    result: Mapping[str, Tensor]
    """What went over a stage border; nothing on the last stage."""
    total: Tensor | None
    """What the stage adds to the loss."""


class _Work(NamedTuple):
    """What a rank does in a step."""

    actions: Sequence[Action]
    coming: Sequence[Sequence[Action]]
    """Before each action, those whose input is received from then on."""
    arrived: Sequence[Sequence[Action]]
    """After each action, the earlier ones whose results have certainly arrived where they went."""


def _work_of(schedule: Schedule, position: int) -> _Work:
    clocks = Clocks(schedule)
    return _Work(schedule[position], receives(clocks)[position], releases(clocks, position))


def _most_under_way(work: _Work) -> dict[tuple[int, Way], tuple[int, int]]:
    """By border and way: microbatches that a rank sends, and that it receives, at once."""
    sent, received = Counter[tuple[int, Way]](), Counter[tuple[int, Way]]()
    most: dict[tuple[int, Way], tuple[int, int]] = {}
    posted = {each for coming in work.coming for each in coming}
    for action, coming, arrived in zip(*work, strict=True):
        received.update(_border_of(each, is_input=True) for each in coming)
        if action.kind != "W":
            sent[_border_of(action, is_input=False)] += 1
        for place in {*sent, *received}:
            before = most.get(place, (0, 0))
            most[place] = max(before[0], sent[place]), max(before[1], received[place])
        received.subtract([_border_of(action, is_input=True)] if action in posted else [])
        sent.subtract(_border_of(each, is_input=False) for each in arrived)
    return most


def _border_of(action: Action, *, is_input: bool) -> tuple[int, Way]:
    """The border and the way over it of what an action works on, or of its result."""
    is_forward = action.kind == "F"
    return action.stage - (is_input == is_forward), "F" if is_forward else "B"


@dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """What one rank computes of a model."""

    stages: Mapping[int, Stage]
    """By number."""
    objective: Objective | None
    """What becomes of the last stage's output; None where this rank does not have that."""
    borders: Mapping[int, Border]
    """What crosses from each stage of the pipeline to the next, by the number of the first."""
    attendances: Mapping[int, Attendance]
    """By stage, how this rank helps the others to parameters where it has no samples."""
    buffers: RunningBuffers
    """What forwards add to."""


class Executor:
    """Forward and backward of one rank's stages over the microbatches of a step.

    Args:
        scale: Losses are divided by it before backward.
        loss_scale: And multiplied by this scalar of the device, if there is one.
        work: Collects weight gradients where the schedule does backward in halves.
    """

    def __init__(
        self,
        rank_plan: RankPlan,
        computation: Computation,
        comm: Comm,
        gradients: Gradients,
        *,
        scale: float,
        loss_scale: Tensor | None = None,
        work: WeightWork | None = None,
    ) -> None:
        self._comm = comm
        self._stages = computation.stages
        self._objective = computation.objective
        self._attendances = computation.attendances
        self.buffers = computation.buffers
        self._runs_empty = any(stage.spans_samples for stage in self._stages.values())
        self._gradients = gradients
        self._scale = scale
        self._loss_scale = loss_scale
        self._work = work
        self._dtype = PRECISIONS[rank_plan.stage_plan.precision].compute.dtype
        self._last = len(rank_plan.pipeline_plan.stages) - 1
        self.border_memory = ReusedMemory(comm.device)
        self._usual = computation.borders
        self.follow(rank_plan)
        self._totals = torch.zeros(2, dtype=torch.float64, device=comm.device)
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._weight_jobs: dict[tuple[int, int], list[Job]] = {}

    def follow(self, rank_plan: RankPlan) -> None:
        """From the next step on do what a plan says that differs in the samples of pipelines."""
        self._rank_plan = rank_plan
        schedule = schedule_of(rank_plan.pipeline_plan)
        forwards = [[action for action in each if action.kind == "F"] for each in schedule]
        self._training, self._evaluation = (
            _work_of(each, rank_plan.position) for each in (schedule, forwards)
        )
        self._under_way = _most_under_way(self._training)
        self._borders: Mapping[int, StageBorder] = {}
        self._borders_of: dict[object, Mapping[int, StageBorder]] = {}
        self.cross(self._usual)

    def cross(self, borders: Mapping[int, Border]) -> None:
        """Let these tensors cross from now on, where they depend on the batch."""
        key = tuple((stage, tuple(border.items())) for stage, border in borders.items())
        if key not in self._borders_of:
            pipeline, memory = self._rank_plan.pipeline_plan, self.border_memory
            self._borders_of[key] = {
                stage: StageBorder(self._comm, pipeline, stage, border, memory)
                for stage, border in borders.items()
                if stage in self._stages or stage + 1 in self._stages
            }
            made = self._borders_of[key]
            for_each = (
                made[stage].messages(way, sent=sent, received=received)
                for (stage, way), (sent, received) in self._under_way.items()
                if stage in made
            )
            self._comm.reserve(chain.from_iterable(for_each))
        if self._borders is not self._borders_of[key]:
            self.border_memory.forget()
        self._borders = self._borders_of[key]

    def train(self, microbatches: Sequence[MicroBatch]) -> Tensor:
        """Every action of the schedule. This rank's sums ``[loss, weight, ...]``, fp64; the rest is
        for ``buffers.settle``, summed over all ranks.

        The result of ``evaluate`` is overwritten by the next call.
        ``microbatches``: this rank's part of each, in order. Parts without samples are skipped,
        unless layers have something to say to those of other ranks.
        """
        self._gradients.begin(sum(map(self._computes, microbatches)))
        self.buffers.begin()
        totals = self._run(self._training, microbatches, nullcontext())
        return torch.cat([totals, *self.buffers.sums(totals.device)])

    def evaluate(self, microbatches: Sequence[MicroBatch]) -> Tensor:
        """Forwards alone, without gradients."""
        return self._run(self._evaluation, microbatches, torch.no_grad())

    def _run(
        self, work: _Work, microbatches: Sequence[MicroBatch], mode: AbstractContextManager[None]
    ) -> Tensor:
        self._totals.zero_()
        with mode:
            for action, coming, arrived in zip(*work, strict=True):
                for each in coming:
                    self._expect(each, microbatches)
                microbatch = microbatches[action.microbatch]
                if self._computes(microbatch):
                    self._do(action, microbatch)
                elif action.stage in self._attendances:  # help the others of the stage
                    self._attendances[action.stage].attend(action.kind)
                for sent in arrived:
                    self._release(sent)
        for border in self._borders.values():
            border.finish()
        return self._totals

    def _computes(self, microbatch: MicroBatch) -> bool:
        return self._runs_empty or len(microbatch) > 0

    def _expect(self, action: Action, microbatches: Sequence[MicroBatch]) -> None:
        """Start to receive what the action works on, where it comes over a stage border."""
        if not self._computes(microbatches[action.microbatch]):
            return
        way: Way = "F" if action.kind == "F" else "B"
        before = action.stage - 1 if way == "F" else action.stage
        if action.kind != "W" and before in self._borders:
            self._borders[before].expect(way, action.microbatch)

    def _release(self, action: Action) -> None:
        """Let go of what the action sent."""
        way: Way = "F" if action.kind == "F" else "B"
        self._borders[action.stage - (way == "B")].release(way, action.microbatch)

    def _do(self, action: Action, microbatch: MicroBatch) -> None:
        with span(str(action)):
            match action.kind:
                case "F":
                    self._forward(action, microbatch)
                case "B" | "I":
                    self._backward(action)
                case "W":
                    self._weights(action)

    def _forward(self, action: Action, microbatch: MicroBatch) -> None:
        given: Mapping[str, Tensor] = microbatch.tensors
        wanted: Mapping[str, Tensor] = {}
        if action.stage:
            given, wanted = self._received(action)
        counts = torch.is_grad_enabled() and self._rank_plan.counts_samples
        with self.buffers.unchanged(counts=counts):
            tree, terms = self._stages[action.stage].compute(given, microbatch.context)
        if action.stage == self._last:
            assert self._objective is not None, "the last stage has the objective"
            terms = added([terms, self._objective(tree, microbatch.tensors)])
            tree = {}
        else:
            sent = {name: tensor.detach() for name, tensor in tree.items()}
            self._borders[action.stage].send("F", action.microbatch, sent)
        self._count(terms)
        if torch.is_grad_enabled():
            kept = _Kept(wanted, tree, total_of(terms))
            self._kept[action.stage, action.microbatch] = kept

    def _received(self, action: Action) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What came over the border, and the part of it that wants a gradient."""
        given = self._borders[action.stage - 1].receive("F", action.microbatch)
        wanted: dict[str, Tensor] = {}
        for name in self._borders[action.stage - 1].differentiable:
            tensor = given[name].to(self._dtype).requires_grad_(torch.is_grad_enabled())
            given[name] = wanted[name] = tensor
        return given, wanted

    def _count(self, terms: Terms) -> None:
        if self._rank_plan.counts_samples:
            for total, weight in terms.values():
                self._totals[0] += total.detach()
                self._totals[1] += weight

    def _backward(self, action: Action) -> None:
        """The whole backward, or all but the linear layers' weight gradients."""
        key = (action.stage, action.microbatch)
        kept = self._kept.pop(key)
        if self._work is not None:
            self._work.is_deferring = action.kind == "I"
        with self.buffers.unchanged(counts=False):  # recomputing adds again
            self._differentiate(kept, action)
        if self._work is not None:
            self._weight_jobs[key] = self._work.take()
        if action.stage:
            grads = {
                name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                for name, tensor in kept.given.items()
            }
            self._borders[action.stage - 1].send("B", action.microbatch, grads)

    def _differentiate(self, kept: _Kept, action: Action) -> None:
        roots: list[Tensor] = []
        grads: list[Tensor | None] = []
        if action.stage != self._last:
            received = self._borders[action.stage].receive("B", action.microbatch)
            for name, grad in received.items():
                if kept.result[name].requires_grad:
                    roots.append(kept.result[name])
                    grads.append(grad.to(kept.result[name].dtype))
        is_last = action.stage == self._last  # whose total must have a gradient
        if kept.total is not None and (is_last or kept.total.requires_grad):
            total = kept.total / self._scale
            roots.append(total if self._loss_scale is None else total * self._loss_scale)
            grads.append(None)
        if roots:
            torch.autograd.backward(roots, grads)

    @torch.no_grad()
    def _weights(self, action: Action) -> None:
        for param, make in self._weight_jobs.pop((action.stage, action.microbatch)):
            self._gradients.add(param, make())

"""Do a schedule's actions with real stages: the one executor of every plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.memory import ReusedMemory
from weft.comm.spans import span
from weft.config.errors import ConfigError
from weft.nn.stage import (
    Begun,
    MicroBatch,
    Objective,
    PartObjective,
    Stage,
    Terms,
    Tree,
    added,
    total_of,
)
from weft.parallel.gradients import Gradients
from weft.parallel.pipeline.deferred import Job, WeightWork
from weft.parallel.pipeline.running import RunningBuffers
from weft.parallel.pipeline.stage_border import StageBorder, Way
from weft.parallel.sharding import Attendance
from weft.plan.layout import Border
from weft.plan.plan import PipelinePlan, RankPlan
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
    begun: Begun | None = None
    """Of a part of the head: what it has found, and what is left to do."""


Moment = Literal["begins", "ended"]
Told = Callable[[Action, Moment], None]


def untold(_action: Action, _moment: Moment) -> None:
    """Nobody asks."""


_Crossing = tuple[int, Way]
"""A border by its number, and which way over it."""


class _Crossings:
    """What actions of a pipeline work on and what comes of them, as far as it crosses borders."""

    def __init__(self, pipeline: PipelinePlan) -> None:
        self._taken: dict[tuple[bool, int], list[_Crossing]] = {}
        self._given: dict[tuple[bool, int], list[_Crossing]] = {}
        for number, (giver, taker) in enumerate(pipeline.borders):
            is_found = giver in pipeline.heads  # which is read in a backward, and has none itself
            self._given.setdefault((True, giver), []).append((number, "F"))
            self._taken.setdefault((not is_found, taker), []).append((number, "F"))
            if not is_found:
                self._given.setdefault((False, taker), []).append((number, "B"))
                self._taken.setdefault((False, giver), []).append((number, "B"))

    def taken(self, action: Action) -> Sequence[_Crossing]:
        """What it works on."""
        return self._of(self._taken, action)

    def given(self, action: Action) -> Sequence[_Crossing]:
        """What comes of it."""
        return self._of(self._given, action)

    def _of(
        self, found: Mapping[tuple[bool, int], Sequence[_Crossing]], action: Action
    ) -> Sequence[_Crossing]:
        return () if action.kind == "W" else found.get((action.kind == "F", action.stage), ())


class _Work(NamedTuple):
    """What a rank does in a step."""

    actions: Sequence[Action]
    coming: Sequence[Sequence[Action]]
    """Before each action, those whose input is received from then on."""
    arrived: Sequence[Sequence[Action]]
    """After each action, the earlier ones whose results have certainly arrived where they went."""


def _work_of(schedule: Schedule, position: int, heads: int) -> _Work:
    if not schedule[position]:  # it only keeps
        return _Work((), (), ())
    clocks = Clocks(schedule, heads=heads)
    return _Work(schedule[position], receives(clocks)[position], releases(clocks, position))


def _most_under_way(work: _Work, crossings: _Crossings) -> dict[_Crossing, tuple[int, int]]:
    """By border and way: microbatches that a rank sends, and that it receives, at once."""
    sent, received = Counter[_Crossing](), Counter[_Crossing]()
    most: dict[_Crossing, tuple[int, int]] = {}
    posted = {each for coming in work.coming for each in coming}
    for action, coming, arrived in zip(*work, strict=True):
        received.update(chain.from_iterable(map(crossings.taken, coming)))
        sent.update(crossings.given(action))
        for place in {*sent, *received}:
            before = most.get(place, (0, 0))
            most[place] = max(before[0], sent[place]), max(before[1], received[place])
        received.subtract(crossings.taken(action) if action in posted else [])
        sent.subtract(chain.from_iterable(map(crossings.given, arrived)))
    return most


@dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """What one rank computes of a model."""

    stages: Mapping[int, Stage]
    """By number."""
    objective: Objective | None
    """What becomes of the last stage's output; None where this rank does not have that."""
    part: PartObjective | None = None
    """Likewise of the part of the head that this rank has."""
    borders: Mapping[int, Border]
    """What crosses each border of the pipeline, by its number."""
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
        self._objective, self._part = computation.objective, computation.part
        self._attendances = computation.attendances
        self.buffers = computation.buffers
        self._runs_empty = rank_plan.stage_plan.mesh.spans_samples or any(
            stage.spans_samples for stage in self._stages.values()
        )
        self._gradients = gradients
        self.scale = scale
        """Sums of losses are divided by it before backward."""
        self._loss_scale = loss_scale
        self._work = work
        self.told: Told = untold
        """Hears when actions compute: twice that one begins, where what it works on had to come."""
        self._dtype = PRECISIONS[rank_plan.stage_plan.precision].compute.dtype
        pipeline = rank_plan.pipeline_plan
        self._last, self._heads = len(pipeline.stages) - 1, pipeline.heads
        self._crossings = _Crossings(pipeline)
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
        forwards = [[action for action in each if self._evaluates(action)] for each in schedule]
        self._training, self._evaluation = (
            _work_of(each, rank_plan.position, len(self._heads)) for each in (schedule, forwards)
        )
        self._under_way = _most_under_way(self._training, self._crossings)
        self._borders: Mapping[int, StageBorder] = {}
        self._borders_of: dict[object, Mapping[int, StageBorder]] = {}
        self.cross(self._usual)

    def cross(self, borders: Mapping[int, Border]) -> None:
        """Let these tensors cross from now on, where they depend on the batch."""
        key = tuple((number, tuple(border.items())) for number, border in borders.items())
        if key not in self._borders_of:
            pipeline, memory = self._rank_plan.pipeline_plan, self.border_memory
            self._borders_of[key] = {
                number: StageBorder(self._comm, pipeline, number, border, memory)
                for number, border in borders.items()
                if self._stages.keys() & {*pipeline.borders[number]}
            }
            made = self._borders_of[key]
            for_each = (
                made[number].messages(way, sent=sent, received=received)
                for (number, way), (sent, received) in self._under_way.items()
                if number in made
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
                elif action.stage in self._attendances and (
                    action.kind == "F" or torch.is_grad_enabled()
                ):  # help the others of the stage
                    self._attendances[action.stage].attend(action.kind)
                for sent in arrived:
                    self._release(sent)
        for border in self._borders.values():
            border.finish()
        return self._totals

    def _evaluates(self, action: Action) -> bool:
        """It is done without gradients too: of a backward of a part of the head, the loss."""
        return action.kind == "F" or (action.stage in self._heads and action.kind != "W")

    def _computes(self, microbatch: MicroBatch) -> bool:
        return self._runs_empty or len(microbatch) > 0

    def _expect(self, action: Action, microbatches: Sequence[MicroBatch]) -> None:
        """Start to receive what the action works on, where it comes over a stage border."""
        if not self._computes(microbatches[action.microbatch]):
            return
        for number, way in self._crossings.taken(action):
            self._borders[number].expect(way, action.microbatch)

    def _release(self, action: Action) -> None:
        """Let go of what the action sent."""
        for number, way in self._crossings.given(action):
            self._borders[number].release(way, action.microbatch)

    def _do(self, action: Action, microbatch: MicroBatch) -> None:
        with span(str(action)):
            self.told(action, "begins")
            match action.kind:
                case "F":
                    self._forward(action, microbatch)
                case "B" | "I":
                    self._backward(action)
                case "W":
                    self._weights(action)
            self.told(action, "ended")

    def _forward(self, action: Action, microbatch: MicroBatch) -> None:
        given: Mapping[str, Tensor] = microbatch.tensors
        wanted: Mapping[str, Tensor] = {}
        if action.stage:
            given, wanted = self._received(action)
            self.told(action, "begins")
        with self.buffers.unchanged(counts=torch.is_grad_enabled()):
            tree, terms = self._stages[action.stage].compute(given, microbatch.context)
        begun, sent = None, {name: tensor.detach() for name, tensor in tree.items()}
        if action.stage in self._heads:
            assert self._part is not None, "a part of the head has a part of the objective"
            begun = self._part(tree, microbatch.tensors)
            tree, sent = {}, dict(begun.found)
        elif action.stage == self._last:
            assert self._objective is not None, "the last stage has the objective"
            terms = added([terms, self._objective(tree, microbatch.tensors)])
            tree = {}
        for number, way in self._crossings.given(action):
            self._borders[number].send(way, action.microbatch, sent)
        self._count(terms)
        if torch.is_grad_enabled() or begun is not None:
            kept = _Kept(wanted, tree, total_of(terms), begun)
            self._kept[action.stage, action.microbatch] = kept

    def _received(self, action: Action) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What came over the border, and the part of it that wants a gradient."""
        ((number, way),) = self._crossings.taken(action)
        given = self._borders[number].receive(way, action.microbatch)
        wanted: dict[str, Tensor] = {}
        for name in self._borders[number].differentiable:
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
        if kept.begun is not None:
            kept.total = total_of(self._whole(action, kept.begun))
        if not torch.is_grad_enabled():
            return
        if self._work is not None:
            self._work.is_deferring = action.kind == "I"
        with self.buffers.unchanged(counts=False):  # recomputing adds again
            self._differentiate(kept, action)
        if self._work is not None:
            self._work.is_deferring = False
            self._weight_jobs[key] = self._work.take()
        if kept.given and all(tensor.grad is None for tensor in kept.given.values()):
            expected = "gradients of what it takes"
            hint = "Freeze all before what cuts the graph, or end the first stage behind it: "
            hint += "gradients that are none would be zeros there."
            raise ConfigError(f"stages[{action.stage}]", "none", expected, hint)
        for number, way in self._crossings.given(action):
            grads = {
                name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                for name, tensor in kept.given.items()
            }
            self._borders[number].send(way, action.microbatch, grads)

    def _whole(self, action: Action, begun: Begun) -> Terms:
        """Of the whole loss, from what all parts of the head have found; counted once."""
        found: dict[int, Tree] = {action.stage: begun.found}
        for number, way in self._crossings.taken(action):
            giver, _ = self._rank_plan.pipeline_plan.borders[number]
            found[giver] = self._borders[number].receive(way, action.microbatch)
        terms = begun.rest([found[stage] for stage in self._heads])
        if action.stage == self._last:
            self._count(terms)
        return terms

    def _differentiate(self, kept: _Kept, action: Action) -> None:
        roots: list[Tensor] = []
        grads: list[Tensor | None] = []
        came_back = self._came_back(action) if kept.begun is None else {}
        self.told(action, "begins")
        for name, grad in came_back.items():
            if kept.result[name].requires_grad:
                roots.append(kept.result[name])
                grads.append(grad.to(kept.result[name].dtype))
        is_last = action.stage in (self._last, *self._heads)  # whose total must have a gradient
        if kept.total is not None and (is_last or kept.total.requires_grad):
            total = kept.total / self.scale
            roots.append(total if self._loss_scale is None else total * self._loss_scale)
            grads.append(None)
        if roots:
            torch.autograd.backward(roots, grads)

    def _came_back(self, action: Action) -> dict[str, Tensor]:
        """The gradients of what a stage gave; of those who took the same the sum, in order."""
        found: dict[str, Tensor] = {}
        for number, way in self._crossings.taken(action):
            for name, grad in self._borders[number].receive(way, action.microbatch).items():
                found[name] = found[name] + grad if name in found else grad
        return found

    @torch.no_grad()
    def _weights(self, action: Action) -> None:
        for param, make in self._weight_jobs.pop((action.stage, action.microbatch)):
            self._gradients.add(param, make())

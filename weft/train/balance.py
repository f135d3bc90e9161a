"""Samples for each pipeline by how fast it really is, made anew every so many steps (``balance``),
and with them the orders that were made for numbers of microbatches.

A step is as long as its slowest pipeline, and chips' speed is never quite what was predicted, nor
stays so. What changes is how many samples of each batch a pipeline takes, between two steps, in the
same processes: numbers do not depend on that, and neither does the order of data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from weft.checkpoint.reader import Checkpoint
from weft.cluster.cluster import HOST
from weft.cost.times import StageTimes
from weft.data.even import following
from weft.data.loader import Loader
from weft.nn.stage import MicroBatch
from weft.parallel.pipeline.executor import Moment, untold
from weft.plan.plan import Plan
from weft.planner.remade import Measured, with_orders_anew, without_orders
from weft.planner.shares import as_in, balanced, shares_in_force
from weft.schedules.action import Action, Kind
from weft.train.job import Job
from weft.train.loop import Hook, Run, StepRecord
from weft.train.run_folder import write_text

PLAN_FILE = "plan.json"
Part = Sequence[MicroBatch]


class _Marks(NamedTuple):
    """Of one step."""

    begun: float | torch.Event
    ended: float | torch.Event

    @property
    def seconds(self) -> float:
        """Between them, once a device has come to the second."""
        begun, ended = self
        if isinstance(begun, float) or isinstance(ended, float):
            assert isinstance(begun, float) and isinstance(ended, float), "of one clock"
            return ended - begun
        return begun.elapsed_time(ended) / 1e3


def _now(device: torch.device) -> float | torch.Event:
    if device.type == HOST:
        return time.perf_counter()
    event = torch.Event(device=device, enable_timing=True)
    event.record()
    return event


class PassTimer:
    """How long forwards and backwards of a rank take, with what it waits for inside its pipeline,
    and without what it waits for of others."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._passes = run.built.engine.passes
        self._marks: list[_Marks] = []
        run.built.engine.passes = self._timed

    def _timed(self, batch: Part) -> Tensor:
        begun = _now(self._run.comm.device)
        sums = self._passes(batch)
        self._marks.append(_Marks(begun, _now(self._run.comm.device)))
        return sums

    def taken(self) -> float:
        """Of a step, in the mean since this was last asked; the first of several warms up."""
        self._run.platform.synchronize()
        marks, self._marks = self._marks[1:] or self._marks, []
        return sum(each.seconds for each in marks) / max(len(marks), 1)


class ActionTimer:
    """How long a rank computes at each stage and kind of action, on a full microbatch, without what
    it waits for at borders: in the last step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._passes = run.built.engine.passes
        self._pipeline = run.plan.pipelines[0]
        self._begun: float | torch.Event = 0.0
        self._marks: dict[str, list[_Marks]] = {}
        run.built.engine.passes = self._watched

    def _watched(self, batch: Part) -> Tensor:
        executor, self._marks = self._run.built.executor, {}
        self._pipeline = self._run.plan.rank_plan(self._run.comm.rank).pipeline_plan
        executor.told = self._told
        sums = self._passes(batch)
        executor.told = untold
        return sums

    def _told(self, action: Action, moment: Moment) -> None:
        size_of, device = self._pipeline.size_of, self._run.comm.device
        if moment == "begins":
            self._begun = _now(device)
        elif size_of(action.microbatch) == size_of(0):
            name = f"{action.kind}{action.stage}"
            self._marks.setdefault(name, []).append(_Marks(self._begun, _now(device)))

    def taken(self) -> dict[str, float]:
        """Seconds by kind and stage; a device has come to the end of the step."""
        return {name: median(mark.seconds for mark in its) for name, its in self._marks.items()}


class _Looks:
    """At what ranks take, all of them together."""

    def __init__(self, run: Run) -> None:
        self._run, self._first = run, run.plan
        self._passes = PassTimer(run)
        self.makes_orders = any(pipeline.lists for pipeline in run.plan.pipelines)
        self._actions = ActionTimer(run) if self.makes_orders else None

    def better(self) -> tuple[Plan, list[float]]:
        """The plan with samples by speed, itself where that is the same; and the seconds of each
        pipeline."""
        mine = self._passes.taken(), {} if self._actions is None else self._actions.taken()
        of_ranks = self._run.comm.gather_json(mine, name="balance")
        before, seconds, measured = self._run.plan, [], []
        for pipeline in before.pipelines:
            ranks = [rank for stage in pipeline.stages for rank in stage.mesh.ranks]
            seconds.append(max(of_ranks[rank][0] for rank in ranks))
            its = [of_ranks[rank][1] for rank in ranks]
            stages = [_times(number, its) for number in range(len(pipeline.stages))]
            measured.append(Measured(seconds=seconds[-1], stages=stages))
        bare = without_orders(before, self._first)
        plan = balanced(bare, seconds)
        if plan == bare:
            return before, seconds
        return with_orders_anew(plan, before, self._first, measured), seconds


def _times(stage: int, of_ranks: Sequence[Mapping[str, float]]) -> StageTimes:
    """Of a stage on the slowest of its ranks, which alone know it."""

    def slowest(kind: Kind) -> float:
        return max(its.get(f"{kind}{stage}", 0.0) for its in of_ranks)

    inputs_s, weights_s = slowest("I") or slowest("B"), slowest("W")
    return StageTimes(forward_s=slowest("F"), input_grad_s=inputs_s, weight_grad_s=weights_s)


def balance_now_and_then(
    run: Run, job: Job, tell: Callable[[str], None], changed: Callable[[], None]
) -> Hook:
    """Give each pipeline samples by its speed, every ``balance.every`` steps, and where its order
    was made one for as many. Goes before saving: a checkpoint says what the next step has.

    ``changed``: called where they are others.
    """
    asked = job.config.balance
    if asked is None:
        return lambda _: None
    looks, every = _Looks(run), asked.every

    def hook(record: StepRecord) -> None:
        if record.step % every or record.step == run.last_step:
            return
        before, (plan, seconds) = run.plan, looks.better()
        if plan == before:
            return
        _follow(run, job, plan, record.step)
        changed()
        shares = [[p.samples for p in each.pipelines] for each in (before, plan)]
        said = f"pipelines take {_words(seconds, '.3g')} s a step: of each batch they now have "
        said += f"{_words(shares[1])} samples, before {_words(shares[0])}"
        if looks.makes_orders:
            orders = ", ".join(filter(None, (pipeline.order for pipeline in plan.pipelines)))
            said += f"; orders are made anew: {orders}"
        facts = {"seconds": seconds, "before": shares[0], "samples": shares[1]}
        run.events.write("balance", said, step=record.step, facts=facts)
        if run.is_main:
            tell(f"step {record.step}: {said}")

    return hook


def _words(numbers: Sequence[float], form: str = "") -> str:
    return ", ".join(format(number, form) for number in numbers)


def _follow(run: Run, job: Job, plan: Plan, step: int) -> None:
    """From the next step on this is the plan."""
    run.plan, mine = plan, plan.rank_plan(run.comm.rank)
    run.built.executor.follow(mine)
    run.built.gradients.follow(mine.pipeline_plan.num_microbatches)
    assert isinstance(run.batches, Loader), "batches of a run come from a loader"
    places = [place for part in mine.microbatches() for place in part]
    run.batches.follow(places, step, following(run.batches.spec, plan))
    if run.is_main:
        write_text(job.out / PLAN_FILE, _to_file(job, plan))


def _to_file(job: Job, plan: Plan) -> str:
    """The plan as it can be asked for again: parts of the head, which fit the tokenizer by now, as
    large as they were before there was one."""
    text = job.files.get(PLAN_FILE)
    asked = plan if text is None else Plan.from_json(text)
    return as_in(asked, plan).to_json()


def with_saved_shares(job: Job, checkpoint: Checkpoint | None) -> tuple[Job, tuple[str, ...]]:
    """The job with the shares that were in force when a checkpoint was written, and a sentence that
    says so where they are others."""
    if job.config.balance is None or checkpoint is None:
        return job, ()
    plan = shares_in_force(job.plan, checkpoint.state.get("plan"))
    if plan == job.plan:
        return job, ()
    files = {**job.files, PLAN_FILE: _to_file(job, plan)} if PLAN_FILE in job.files else job.files
    shares = _words([pipeline.samples for pipeline in plan.pipelines])
    said = f"pipelines have {shares} samples of each batch, as when the checkpoint was written"
    return replace(job, plan=plan, files=files), (said,)

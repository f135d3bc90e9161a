"""Samples for each pipeline by how fast it really is, made anew every so many steps (``balance``).

A step is as long as its slowest pipeline, and chips' speed is never quite what was predicted, nor
stays so. What changes is how many samples of each batch a pipeline takes, between two steps, in the
same processes: numbers do not depend on that, and neither does the order of data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from weft.checkpoint.reader import Checkpoint
from weft.cluster.cluster import HOST
from weft.data.even import following
from weft.data.loader import Loader
from weft.nn.stage import MicroBatch
from weft.plan.plan import Plan
from weft.planner.shares import balanced, shares_in_force, with_shares
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


class PassTimer:
    """How long forwards and backwards of a rank take, with what it waits for inside its pipeline,
    and without what it waits for of others."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._passes = run.built.engine.passes
        self._marks: list[_Marks] = []
        run.built.engine.passes = self._timed

    def _timed(self, batch: Part) -> Tensor:
        begun = self._now()
        sums = self._passes(batch)
        self._marks.append(_Marks(begun, self._now()))
        return sums

    def _now(self) -> float | torch.Event:
        device = self._run.comm.device
        if device.type == HOST:
            return time.perf_counter()
        event = torch.Event(device=device, enable_timing=True)
        event.record()
        return event

    def taken(self) -> float:
        """Of a step, in the mean since this was last asked; the first of several warms up."""
        self._run.platform.synchronize()
        marks, self._marks = self._marks[1:] or self._marks, []
        return sum(each.seconds for each in marks) / max(len(marks), 1)


def balance_now_and_then(
    run: Run, job: Job, tell: Callable[[str], None], changed: Callable[[], None]
) -> Hook:
    """Give each pipeline samples by its speed, every ``balance.every`` steps. Goes before saving:
    a checkpoint says the shares that the next step has.

    ``changed``: called where they are others.
    """
    asked = job.config.balance
    if asked is None:
        return lambda _: None
    timer, every = PassTimer(run), asked.every

    def hook(record: StepRecord) -> None:
        if record.step % every or record.step == run.last_step:
            return
        of_ranks = run.comm.gather_json(timer.taken(), name="balance")
        seconds = [
            max(of_ranks[rank] for stage in pipeline.stages for rank in stage.mesh.ranks)
            for pipeline in run.plan.pipelines
        ]
        before, plan = run.plan, balanced(run.plan, seconds)
        if plan == before:
            return
        _follow(run, job, plan, record.step)
        changed()
        shares = [[p.samples for p in each.pipelines] for each in (before, plan)]
        said = f"pipelines take {_words(seconds, '.3g')} s a step: of each batch they now have "
        said += f"{_words(shares[1])} samples, before {_words(shares[0])}"
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
    return with_shares(asked, [pipeline.samples for pipeline in plan.pipelines]).to_json()


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

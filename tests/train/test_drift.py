"""A rank that is slow gets less work while the job runs, and the numbers stay."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resolve import profiles
from train.small_jobs import LAPTOP, losses
from train.test_life import live
from train.test_replan import read

from weft.cluster.cluster import Cluster
from weft.comm.abort import Abort
from weft.comm.address import RankAddress
from weft.config.load import load_config
from weft.elastic import drift
from weft.elastic.drift import Drift
from weft.elastic.failure import Epoch
from weft.elastic.pool import WorkerPool
from weft.elastic.processes import run_ranks
from weft.elastic.recovery import Restarts
from weft.elastic.replan import Replans
from weft.plan.plan import Plan
from weft.report.events import EVENTS_FILE, read_events
from weft.resolve.prediction import predict_run
from weft.resolve.resolve import resolve
from weft.train.engine import Engine
from weft.train.job import Job
from weft.train.worker import main

EXACT = 1e-10
"""In fp64: sums of other plans are added in another order."""
STEPS = 24
TIMES = 4
"""As long rank 1 takes for all that it does, however busy the machine is."""
ASKED = [
    *["batch.samples=10", "batch.micro=1", "data.seq_len=32", "data.workers=0"],
    *["compute.precision=fp64", "compute.device=cpu", "recovery.alarm=replan"],
    *[f"train.steps={STEPS}", "train.eval_every=0", "train.log_every=1", "checkpoint.minutes=0"],
    *["metrics.report=false", "metrics.tensorboard=false", "sample.prompts=[]"],
    "train.eval_samples=4",
]


@contextmanager
def slowed(rank: int, notes: Path) -> Iterator[None]:
    """Rank 1 stops after each step for as long as it was at work, and more; who had how many
    samples is noted."""
    step = Engine.step

    def late(engine: Engine, batch: Any, **settings: Any) -> Any:
        began, waited_s = time.perf_counter(), engine.comm.recorder.waited_s
        result = step(engine, batch, **settings)
        waited_s -= engine.comm.recorder.waited_s
        if rank == 1:
            time.sleep((TIMES - 1) * (time.perf_counter() - began + waited_s))
        with (notes / f"{rank}").open("a") as file:
            samples = sum(len(part.tensors["tokens"]) for part in batch)
            file.write(f"{os.getpid()} {samples}\n")
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", late)
        yield


def trains(address: RankAddress, job: Job, notes: Path, *, abort: Abort | None = None) -> None:
    with slowed(address.rank, notes):
        main(address, job, abort=abort)


def job_of(out: Path, plan: Plan | None = None) -> tuple[Job, Replans]:
    """``plan``: only shares of it may be changed."""
    more = "plan.shares=[5,5]" if plan is None else "plan={auto: {max_stages: 1}}"
    loaded = load_config("debug", [*ASKED, more])
    resolved = resolve(loaded, Cluster(nodes=(LAPTOP,)), plan=plan)
    job = Job(
        config=resolved.config,
        plan=resolved.plan,
        out=out,
        last_step=STEPS,
        threads=1,
        console="quiet",
        prediction=predict_run(resolved),
    )
    return job, Replans(loaded, resolved, job)


class WithNotes:
    """What it wants, the ranks do beside their notes."""

    def __init__(self, drift: Drift, notes: Path) -> None:
        self.wanted, self._epoch, self._notes = drift.wanted, drift.epoch, notes

    def epoch(self) -> Epoch:
        epoch = self._epoch()
        return replace(epoch, args=(*epoch.args, self._notes))


def test_a_slow_rank_gets_less_while_the_job_runs(
    tmp_path: Path, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same processes; the losses and batches are those of a run that never moved."""
    monkeypatch.setenv("WEFT_PROFILES", str(tmp_path / "profiles"))
    profiles.save(tmp_path / "profiles", LAPTOP)
    monkeypatch.setattr(drift, "MOVE_S", 0.0)  # a run of seconds would not pay for a move
    notes, said = tmp_path / "notes", list[str]()
    notes.mkdir()
    first, _ = job_of(tmp_path / "drifts")
    job, replans = job_of(first.out, first.plan)
    job.out.mkdir()
    with Drift(replans, said.append) as watch:
        run_ranks(
            trains,
            (job, notes),
            2,
            folder=job.out,
            recover=Restarts(job, said.append, replans),
            moves=WithNotes(watch, notes),
        )
    steps = [[line.split() for line in (notes / f"{r}").read_text().splitlines()] for r in (0, 1)]
    assert [len({pid for pid, _ in each}) for each in steps] == [1, 1], "the same processes"
    shares = [(int(one), int(other)) for (_, one), (_, other) in zip(*steps, strict=True)]
    assert len(shares) == STEPS
    assert shares[0] == (5, 5)
    moves = [line for line in said if ": the plan is now 2 ranks: 1 + 1, with " in line]
    events = [e for e in read_events(job.out / EVENTS_FILE) if e.kind == "replan"]
    told = [each.message for each in events if each.facts.get("predicted_s")]
    assert [line.partition(": ")[2] for line in moves] == told
    assert told[0].startswith("rank 1 "), said
    after = shares[next(each.step for each in events if each.message == told[0]) :]
    assert after, said
    assert all(one + other == 10 and other < 5 for one, other in after), "it never gets more"
    plan = json.loads((job.out / "plan.json").read_text())
    assert tuple(pipeline["samples"] for pipeline in plan["pipelines"]) == shares[-1]

    alone = tmp_path / "alone"
    one = resolve(load_config("debug", [*ASKED, "plan.shares=[10]"]), Cluster(nodes=(LAPTOP,)))
    pool.run(live, [replace(job, plan=one.plan, prediction=None, out=alone)], world_size=1)
    found = losses(job.out)
    assert len(found) == STEPS
    assert found == pytest.approx(losses(alone), rel=EXACT)
    assert read(job.out) == read(alone), "the same batches"

"""What is left of a job goes on under another plan, in the same processes, to the same numbers."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from train.small_jobs import LAPTOP, losses
from train.test_life import live

from weft.cluster.cluster import Cluster, Node
from weft.comm.abort import Abort
from weft.comm.address import RankAddress
from weft.config.load import load_config
from weft.elastic.failure import Epoch, Failure
from weft.elastic.pool import WorkerPool
from weft.elastic.processes import run_ranks
from weft.elastic.recovery import Restarts
from weft.elastic.replan import Replans
from weft.report.events import EVENTS_FILE, read_events
from weft.resolve.resolve import resolve
from weft.train.engine import Engine
from weft.train.job import Job
from weft.train.loop import Run
from weft.train.worker import main

EXACT = 1e-10
"""In fp64: sums of other plans are added in another order."""
STEPS = 9
ASKED = [
    *["batch.samples=8", "batch.micro=1", "data.seq_len=32", "data.workers=0"],
    *["plan.shares=[2,2,2,2]", "compute.precision=fp64", "recovery.when_lost=replan"],
    *[f"train.steps={STEPS}", "train.eval_every=0", "checkpoint.minutes=0"],
    *["checkpoint.snapshot_every=1", "checkpoint.memory_s=600"],
    *["metrics.report=false", "metrics.tensorboard=false", "sample.prompts=[]"],
    "train.eval_samples=4",
]
LOST = {4: 1, 3: 0}
"""World size -> the rank of it that is lost."""
AFTER = 3
"""Steps of an epoch that it does."""


def asked(out: Path, *more: str, node: Node = LAPTOP) -> tuple[Job, Replans]:
    loaded = load_config("debug", [*ASKED, *more])
    resolved = resolve(loaded, Cluster(nodes=(node,)))
    job = Job(
        config=resolved.config,
        plan=resolved.plan,
        out=out,
        last_step=STEPS,
        threads=1,
        console="quiet",
    )
    return job, Replans(loaded, resolved, job)


@contextmanager
def lost(rank: int, world_size: int, notes: Path) -> Iterator[None]:
    """This process ends in a step if it is that rank; where the epoch began is noted."""
    step, done = Engine.step, []

    def dies(engine: Engine, *given: Any, **settings: Any) -> Any:
        done.append(0)
        if len(done) == AFTER + 1 and rank == LOST.get(world_size):
            os.kill(os.getpid(), signal.SIGKILL)
        return step(engine, *given, **settings)

    def noted(run: Run, *given: Any) -> int:
        with (notes / f"{world_size}-{rank}").open("w") as file:
            file.write(f"{os.getpid()} {run.first_step}")
        return run_job(run, *given)

    from weft.train import worker

    run_job = worker.run_job
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", dies)
        patch.setattr(worker, "run_job", noted)
        yield


def trains(address: RankAddress, job: Job, notes: Path, *, abort: Abort | None = None) -> None:
    with lost(address.rank, address.world_size, notes):
        main(address, job, abort=abort)


def test_four_ranks_become_three_and_two(tmp_path: Path, pool: WorkerPool) -> None:
    """The same losses as runs of each plan from checkpoints, and as a run of one rank."""
    notes, said, jobs = tmp_path / "notes", [], []
    notes.mkdir()
    job, replans = asked(tmp_path / "left")
    restarts = Restarts(job, said.append, replans)
    jobs.append(job)

    def recover(failures: Sequence[Failure]) -> Epoch:
        epoch = restarts(failures)
        assert epoch is not None
        jobs.append(epoch.args[0])
        return replace(epoch, args=(*epoch.args, notes))

    run_ranks(trains, (job, notes), 4, folder=job.out, recover=recover)
    assert [each.plan.world_size for each in jobs] == [4, 3, 2]
    assert {each.plan.global_batch for each in jobs} == {8}
    noted = {n: [(notes / f"{n}-{r}").read_text().split() for r in range(n)] for n in (4, 3, 2)}
    pids = {size: [pid for pid, _ in each] for size, each in noted.items()}
    assert pids[3] == [pids[4][rank] for rank in (0, 2, 3)], "survivors keep their process"
    assert pids[2] == [pids[3][rank] for rank in (1, 2)]
    began = [int(noted[size][0][1]) for size in (4, 3, 2)]
    assert began[0] == 0
    assert began[2] > began[1] > 0, "from what was in memory"

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pool.run(live, [asked(whole, "plan.shares=[8]")[0]], world_size=1)
    for each, until in zip(jobs, [*began[1:], STEPS], strict=True):
        part = replace(each, out=parts, last_step=until)
        pool.run(live, [part], world_size=each.plan.world_size)
    found = losses(job.out)
    assert len(found) == STEPS
    assert found == pytest.approx(losses(parts), rel=EXACT)
    assert found == pytest.approx(losses(whole), rel=EXACT)
    assert read(job.out) == read(whole), "the same batches"
    plan = json.loads((job.out / "plan.json").read_text())
    assert sum(pipeline["samples"] for pipeline in plan["pipelines"]) == 8
    words = [line.partition(";")[0] for line in said[1::2]]
    assert [line.startswith("the plan is now ") for line in said[1::2]] == [True, True], said
    assert words == [
        "the plan is now 3 ranks: dp 3, instead of 4 ranks: 1 + 1 + 1 + 1",
        "the plan is now 2 ranks: dp 2, instead of 3 ranks: dp 3",
    ]
    events = read_events(job.out / EVENTS_FILE)
    assert [e.message for e in events if e.kind == "replan"] == said[1::2]


def read(out: Path) -> list[tuple[int, int]]:
    """Samples that were read by each step, and which."""
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(row["samples"], row["data"]) for row in rows if "loss" in row]


LOST_RANK = [Failure(1, "signal", "was ended by SIGKILL from outside", is_gone=True)]


def test_where_nothing_fits_a_lost_rank_is_replaced(tmp_path: Path) -> None:
    said: list[str] = []
    small = replace(LAPTOP, memory_gib=0.02)
    job, replans = asked(tmp_path, node=small)
    assert Restarts(job, said.append, replans)(LOST_RANK) == Epoch((job,), 4)
    assert "lost ranks are replaced, for there is no other plan: cluster = " in said[1]
    assert "GiB more than" in said[1]


def test_a_rank_that_only_gave_up_is_no_reason_to_plan_again(tmp_path: Path) -> None:
    said: list[str] = []
    job, replans = asked(tmp_path)
    at_door = [replace(LOST_RANK[0], cause="peer", is_gone=False)]
    assert Restarts(job, said.append, replans)(at_door) == Epoch((job,), 4)
    assert len(said) == 1

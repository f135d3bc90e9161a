"""A process that does one job after another keeps no thread, socket or file of those it left."""

import gc
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity.cases import Case

from weft.comm.abort import Abort
from weft.comm.address import RankAddress
from weft.comm.errors import CommError
from weft.comm.join import join_at
from weft.comm.rendezvous import Rendezvous
from weft.diagnose.verify import Rehearsal, synthetic_microbatches
from weft.elastic.pool import WorkerPool
from weft.plan.plan import Plan
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan

EPOCHS = 80
RESTARTS = 25
TRAINING = 13
"""One epoch in so many trains, and the plans take turns."""
PLANS = [
    Case("zero1", shares=(4,), dp=((2,),), zero=1),
    Case("zero3", shares=(4,), dp=((2,),), zero=3),
    Case("tp2", shares=(4,), dp=((1,),), tp=((2,),), microbatch=4),
    Case("pipelines", shares=(3, 1), zero=2),
]
SETTLED_S = 300.0
"""A thread that was told to end may take a while on a busy machine."""


def counts() -> tuple[int, int]:
    """Threads and open files of this process."""
    gc.collect()
    threads, files = (len(list(Path("/proc/self", what).iterdir())) for what in ("task", "fd"))
    return threads, files


def one_job(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> None:
    comm, _ = join_plan(address, plan, timeout_s=600)
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    fill(built.gradients, initial(rehearsal.seed))
    built.engine.step(synthetic_microbatches(comm, plan, rehearsal, 0))
    comm.close()


def one_epoch(address: RankAddress, plan: Plan) -> None:
    """Every kind of group and a call in each, without a model."""
    comm, _ = join_plan(address, plan, timeout_s=600)
    comm.open_gathering([comm.world])
    comm.all_reduce(torch.ones(3), name="sum")
    comm.all_gather(torch.ones(2), name="gather", group=comm.world)()
    comm.close()


def many_jobs(
    address: RankAddress, plans: list[Plan], rehearsal: Rehearsal
) -> tuple[tuple[int, int], tuple[int, int]]:
    """What is open after each plan was run once, and after all epochs."""
    for number in range(EPOCHS):
        if number < len(plans) or number % TRAINING == 0:
            one_job(address, plans[number % len(plans)], rehearsal)
        else:
            one_epoch(address, plans[0])
        if number + 1 == len(plans):
            first = counts()
    deadline = time.monotonic() + SETTLED_S
    while (last := counts()) > first and time.monotonic() < deadline:
        time.sleep(0.1)
    return first, last


def test_many_jobs_in_one_process_leave_nothing_open(pool: WorkerPool) -> None:
    rehearsal = replace(PLANS[0].rehearsal(), seq_len=8)
    plans = [case.plan() for case in PLANS]
    for first, last in pool.run(many_jobs, plans, rehearsal, world_size=2, timeout_s=1200):
        assert last[0] <= first[0], f"threads: {first[0]} at first, {last[0]} after {EPOCHS} jobs"
        assert last[1] <= first[1], f"files: {first[1]} at first, {last[1]} after {EPOCHS} jobs"


def many_lost_peers(address: RankAddress) -> tuple[tuple[int, int], tuple[int, int]]:
    """What is open after one epoch that another thread ended, while ranks wait for each other, and
    after many."""
    for number in range(RESTARTS):
        abort = Abort()
        assert address.store_file is not None
        place = replace(address, store_file=address.store_file.with_name(f"meet-{number}"))
        with Rendezvous(place, 600, abort=abort) as rendezvous:
            comm = join_at(rendezvous, backend="gloo", device=torch.device("cpu"))
            comm.open_gathering([comm.world])
            comm.barrier(name="all here")
            if address.rank == 1:
                abort.ask()
            with pytest.raises(CommError):
                comm.barrier(name="waits")
            comm.close(abort=True)
        if number == 0:
            first = counts()
    deadline = time.monotonic() + SETTLED_S
    while (last := counts()) > first and time.monotonic() < deadline:
        time.sleep(0.1)
    return first, last


def test_epochs_that_were_ended_from_outside_leave_nothing_open(pool: WorkerPool) -> None:
    for first, last in pool.run(many_lost_peers, world_size=2):
        assert last[0] <= first[0], f"threads: {first[0]} at first, {last[0]} later"
        assert last[1] <= first[1], f"files: {first[1]} at first, {last[1]} later"


def losses_of(address: RankAddress, plans: list[Plan], rehearsal: Rehearsal) -> list[list[float]]:
    """Of one job for each plan, all open at once, in turns."""
    comms = [join_plan(address, plan, timeout_s=600)[0] for plan in plans]
    jobs = []
    for comm, plan in zip(comms, plans, strict=True):
        built = assemble_model(
            plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
        )
        fill(built.gradients, initial(rehearsal.seed))
        jobs.append((comm, plan, built))
    losses: list[list[float]] = [[] for _ in plans]
    for step in range(3):
        for (comm, plan, built), found in zip(jobs, losses, strict=True):
            batch = synthetic_microbatches(comm, plan, rehearsal, step)
            found.append(float(built.engine.step(batch).loss))
    for comm in comms:
        comm.close()
    return losses


def test_jobs_of_one_process_do_not_disturb_each_other(pool: WorkerPool) -> None:
    rehearsal = replace(PLANS[0].rehearsal(), seq_len=8)
    plans = [case.plan() for case in PLANS]
    alone = [pool.run(losses_of, [plan], rehearsal, world_size=2)[0][0] for plan in plans]
    for together in pool.run(losses_of, plans, rehearsal, world_size=2):
        assert together == alone

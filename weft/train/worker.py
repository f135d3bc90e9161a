"""The life of one rank in phases: join, agree, build, restore, run, leave.

The next epoch begins again with the first one: after a change of plan, or when ranks were lost, a
rank need not be a new process.
"""

from __future__ import annotations

import functools
import gc
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from weft.checkpoint.agent.lease import Lease
from weft.checkpoint.reader import Checkpoint
from weft.comm.abort import Abort
from weft.comm.address import RankAddress
from weft.comm.join import join_at
from weft.comm.rendezvous import Rendezvous
from weft.report.events import EventLog
from weft.train.agreeing import agree, way_out
from weft.train.assemble import Built, fill, initial
from weft.train.balance import with_saved_shares
from weft.train.family import assemble_model
from weft.train.history import note_rewinds
from weft.train.job import Job
from weft.train.joining import device_of
from weft.train.loop import Run
from weft.train.out_of_memory import out_of_memory
from weft.train.run_folder import LOGS
from weft.train.running import batches, run_job, write_files
from weft.train.save_clock import SaveClock
from weft.train.saving import restore
from weft.train.stop import StopSignal, own_stop
from weft.train.watch import RewoundError

Phase = Literal["join", "agree", "build", "restore", "run", "leave"]


def main(address: RankAddress, job: Job, *, abort: Abort | None = None) -> None:
    """Train. The same in a rank that Weft started and in one that torchrun started.

    ``abort``: what another thread ends the epoch with, when a rank was lost.
    """
    stop = own_stop()
    stop.listen()
    torch.set_num_threads(job.threads)
    with Rendezvous(address, job.config.train.timeout_s, abort=abort) as rendezvous:
        life = RankLife(rendezvous, stop, _lease())
        while _has_gone_back(life, job):
            gc.collect()  # models hold themselves in circles


def _has_gone_back(life: RankLife, job: Job) -> bool:
    """Train; whether the next epoch is to go on from before some step."""
    try:
        life.epoch(job)
    except RewoundError as error:
        return not error.stops
    return False


@functools.cache
def _lease() -> Lease:
    """Of this process, for all the epochs that it is a rank of."""
    return Lease()


@dataclass(frozen=True)
class RankLife:
    """What a rank does from joining a job to leaving it, as often as a job begins."""

    rendezvous: Rendezvous
    stop: StopSignal
    lease: Lease = field(default_factory=Lease)
    """Memory of this machine outlives what becomes of an epoch."""

    def epoch(self, job: Job) -> int:
        """All phases in their order. Returns the training steps done in all.

        After an error nothing of the epoch is left, and the next one may begin.
        """
        self._enter("join")
        config, plan, address = job.config, job.plan, self.rendezvous.address
        platform, device = device_of(address, plan, job.cards)
        platform.multiply_fp32(tf32=config.compute.tf32)
        comm = join_at(self.rendezvous, device=device, **platform.joining())
        self.stop.ends_at_once = False
        comm.recorder.keep_in(job.out / LOGS, patience_s=comm.timeout_s / 2)
        try:
            self._enter("agree")
            agreed = agree(job, comm, address.local_rank, platform.versions(), lease=self.lease)
            checkpoint, first_step = agreed.checkpoint, agreed.first_step
            job, shares = with_saved_shares(replace(job, plan=agreed.plan), checkpoint)
            plan = job.plan
            self._enter("build")
            seq_len = config.data.seq_len
            built = assemble_model(
                plan,
                agreed.spec,
                comm,
                optim=config.optim,
                seq_len=seq_len,
                skips_non_finite=config.recovery.skips,
                sites=config.sites,
            )
            self._enter("restore")
            events = EventLog(job.out if comm.rank == 0 else None, began=job.began)
            if checkpoint is None:
                start = initial(config.seed)
                wanted = agreed.loading
                fill(built.gradients, start if wanted is None else wanted.values(start))
                if built.meeting is not None:
                    built.meeting.start(0)
            else:
                go_on(built, checkpoint, events, in_memory=agreed.is_in_memory)
            self._enter("run")
            if comm.rank == 0:
                write_files(job, agreed.data)
                if agreed.history.rewinds:  # what is left out is fixed from here on
                    note_rewinds(job.out, agreed.history.rewinds)
            with ExitStack() as stack:
                run = Run(
                    config=config,
                    plan=plan,
                    spec=agreed.spec,
                    comm=comm,
                    platform=platform,
                    built=built,
                    batches=batches(job, agreed, comm.rank, first_step, stack),
                    first_step=first_step,
                    last_step=max(job.last_step, first_step),
                    stop=self.stop,
                    events=events,
                    history=agreed.history,
                    lease=self.lease,
                    save_clock=SaveClock(config.checkpoint.minutes),
                    abort=self.rendezvous.abort or Abort(),
                )
                notes = (*agreed.notes, *shares)
                done = run_job(run, replace(job, owner=agreed.owner), agreed.data, notes, stack)
        except RewoundError:  # on all ranks, so nobody waits for this one
            comm.close()
            raise
        except torch.OutOfMemoryError as error:
            comm.close(abort=True)
            raise out_of_memory(error, job, address.rank, device) from error
        except BaseException:
            comm.close(abort=True)
            raise
        self._enter("leave")
        comm.close()  # once the others have opened theirs
        return done

    def _enter(self, phase: Phase) -> None:
        """Say where this rank is, for whoever watches it."""
        file = self.rendezvous.address.phase_file
        if file is not None:
            file.write_text(phase)


def go_on(built: Built, checkpoint: Checkpoint, events: EventLog, *, in_memory: bool) -> None:
    """Restore what a checkpoint holds, and let go of it."""
    started = time.perf_counter()
    hint = f"Without {checkpoint.folder} the run goes on from the checkpoint before it,"
    with way_out(f"{hint} or begins again."):
        restore(built, checkpoint)
    checkpoint.close()
    source, seconds = "memory" if in_memory else "disk", time.perf_counter() - started
    said = f"the state after step {checkpoint.step} was restored from {source}"
    facts = {"source": source, "seconds": seconds}
    events.write("restore", said, step=checkpoint.step, facts=facts)

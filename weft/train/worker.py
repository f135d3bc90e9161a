"""The life of one rank in phases: join, agree, build, restore, run, leave.

Each phase takes and gives data, and the next epoch begins again with the first one: after a change
of plan, or when ranks were lost, a rank need not be a new process.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch

from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.rendezvous import Rendezvous
from weft.platform.base import Platform
from weft.train.agreeing import Agreed, agree, way_out
from weft.train.assemble import Built, fill, initial
from weft.train.family import assemble_model
from weft.train.job import Job
from weft.train.joining import join_plan_at
from weft.train.loop import Run
from weft.train.run_folder import LOGS
from weft.train.running import Training, batches, write_files
from weft.train.saving import restore
from weft.train.stop import StopSignal

Phase = Literal["join", "agree", "build", "restore", "run", "leave"]


@dataclass(frozen=True)
class Joined:
    """What joining gives: this rank among the others, on its device."""

    comm: Comm
    platform: Platform


@dataclass(frozen=True)
class Restored:
    """What restoring gives: where training starts."""

    first_step: int
    """Steps that were done before."""
    notes: Sequence[str]
    """What is worth knowing of the checkpoint."""


def main(address: RankAddress, job: Job) -> None:
    """Train. The same in a rank that Weft started and in one that torchrun started."""
    stop = StopSignal()
    stop.listen()
    torch.set_num_threads(job.threads)
    with Rendezvous(address, job.config.train.timeout_s) as rendezvous:
        RankLife(rendezvous, stop).epoch(job)


class RankLife:
    """What a rank does from joining a job to leaving it, as often as a job begins."""

    def __init__(self, rendezvous: Rendezvous, stop: StopSignal) -> None:
        self._rendezvous = rendezvous
        self._stop = stop

    def epoch(self, job: Job) -> int:
        """All phases in their order. Returns the training steps done in all.

        After an error nothing of the epoch is left, and the next one may begin.
        """
        joined = self.join(job)
        try:
            agreed = self.agree(job, joined)
            built = self.build(job, joined, agreed)
            restored = self.restore(job, agreed, built)
            done = self.run(job, joined, agreed, built, restored)
        except BaseException:
            joined.comm.close(abort=True)
            raise
        self.leave(joined)
        return done

    def join(self, job: Job) -> Joined:
        """Meet the other ranks of the plan, on the device that this rank's stage names."""
        self._enter("join")
        comm, platform = join_plan_at(self._rendezvous, job.plan)
        comm.flight.keep_in(job.out / LOGS, patience_s=comm.timeout_s / 2)
        return Joined(comm, platform)

    def agree(self, job: Job, joined: Joined) -> Agreed:
        """Make sure that all ranks know the same job, data and checkpoint."""
        self._enter("agree")
        return agree(job, joined.comm, self._rendezvous.address.local_rank)

    def build(self, job: Job, joined: Joined, agreed: Agreed) -> Built:
        """This rank's part of the model and its engine, without values."""
        self._enter("build")
        seq_len = job.config.data.seq_len
        return assemble_model(
            job.plan, agreed.spec, joined.comm, optim=job.config.optim, seq_len=seq_len
        )

    def restore(self, job: Job, agreed: Agreed, built: Built) -> Restored:
        """The values of the checkpoint, or those that a run begins with."""
        self._enter("restore")
        checkpoint = agreed.checkpoint
        if checkpoint is None:
            fill(built.gradients, initial(job.config.seed))
            return Restored(0, ())
        folder = checkpoint.folder
        hint = f"Without {folder} the run goes on from the checkpoint before it, or begins again."
        with way_out(hint):
            restore(built, checkpoint)
        return Restored(checkpoint.step, checkpoint.notes)

    def run(
        self, job: Job, joined: Joined, agreed: Agreed, built: Built, restored: Restored
    ) -> int:
        """Train. Returns the steps done in all."""
        self._enter("run")
        comm, first_step = joined.comm, restored.first_step
        if comm.rank == 0:
            write_files(job, agreed.data)
        with ExitStack() as stack:
            run = Run(
                config=job.config,
                plan=job.plan,
                spec=agreed.spec,
                comm=comm,
                platform=joined.platform,
                built=built,
                batches=batches(job, agreed.data, comm.rank, first_step, stack),
                first_step=first_step,
                last_step=max(job.last_step, first_step),
                stop=self._stop,
            )
            return Training(job, agreed.data, restored.notes, stack).train(run)

    def leave(self, joined: Joined) -> None:
        """Close the groups, once the others have opened theirs."""
        self._enter("leave")
        joined.comm.close()

    def _enter(self, phase: Phase) -> None:
        """Say where this rank is, for whoever watches it."""
        file = self._rendezvous.address.phase_file
        if file is not None:
            file.write_text(phase)

"""One rank of a run whose faults are appointed. It imports little, for a job waits for it."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.chaos.faults import Appointments, appointed
from weft.comm.abort import Abort
from weft.comm.address import RankAddress
from weft.train import worker
from weft.train.job import Job

VARIABLE = "WEFT_BENCH_FAULTS"
"""Of the environment: where appointments are, and the process that a person started."""


def rank(address: RankAddress, job: Job, *, abort: Abort | None = None) -> None:
    """Train, and do what is appointed."""
    folder, _, launcher = os.environ[VARIABLE].rpartition(":")
    with appointed(Appointments(Path(folder), address.rank, int(launcher))):
        worker.main(address, job, abort=abort)

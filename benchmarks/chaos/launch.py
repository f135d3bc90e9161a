"""``weft train`` whose ranks do what is appointed to them: started by ``benchmarks.chaos``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.chaos.faults import Appointments, appointed
from weft.cli import train
from weft.cli.main import main
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


if __name__ == "__main__":
    where, *words = sys.argv[1:]
    os.environ[VARIABLE] = f"{where}:{os.getpid()}"
    train.WORKER = f"{__spec__.name}:{rank.__name__}"
    sys.argv = ["weft", "train", *words]
    main()

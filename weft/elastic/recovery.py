"""What a training job does after ranks were lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.comm.flight_recorder import cause_of_hang, read_records
from weft.elastic.failure import Epoch, Failure, RanksFailedError
from weft.train.job import Job
from weft.train.run_folder import LOGS
from weft.train.run_list import last_step


class Restarts:
    """Begins the job again with new processes in the places of those that were lost.

    Args:
        tell: Says a line to the person who started the job.
    """

    def __init__(self, job: Job, tell: Callable[[str], None]) -> None:
        self._job = job
        self._tell = tell
        self._in_a_row = 0
        self._furthest = 0

    def __call__(self, failures: Sequence[Failure]) -> Epoch | None:
        """What the ranks do next; None: there were too many restarts without a new step."""
        most = self._job.config.recovery.restarts
        step = int(last_step(self._job.out / "metrics.jsonl").get("step", 0))
        if step > self._furthest:
            self._furthest, self._in_a_row = step, 0
        if self._in_a_row == most:
            return None
        self._in_a_row += 1
        error = RanksFailedError(failures, cause_of_hang(read_records(self._job.out / LOGS)))
        where = f" in phase {error.first.phase}" if error.first.phase else ""
        self._tell(f"{error}{where}, after step {step}: restart {self._in_a_row} of {most} begins")
        return Epoch((self._job,), self._job.plan.world_size)

"""What a training job does after ranks were lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.comm.flight_recorder import cause_of_hang, read_records
from weft.elastic.failure import Epoch, Failure, RanksFailedError
from weft.report.events import EventLog
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
        self._events = EventLog(job.out, began=job.began)
        self._in_a_row = 0
        self._furthest = 0

    def __call__(self, failures: Sequence[Failure]) -> Epoch | None:
        """What the ranks do next; None: there were too many restarts without a new step."""
        most = self._job.config.recovery.restarts
        step = int(last_step(self._job.out / "metrics.jsonl").get("step", 0))
        if step > self._furthest:
            self._furthest, self._in_a_row = step, 0
        error = RanksFailedError(failures, cause_of_hang(read_records(self._job.out / LOGS)))
        first = error.first
        lost = f"{error} in phase {first.phase}" if first.phase else str(error)
        facts = {"cause": first.cause, "phase": first.phase}
        self._events.write("epoch_end", lost, step=step, rank=first.rank, facts=facts)
        if self._in_a_row == most:
            return None
        self._in_a_row += 1
        said = f"restart {self._in_a_row} of {most} begins"
        self._events.write("restart", said, step=step, rank=first.rank)
        self._tell(f"{lost}, after step {step}: {said}")
        return Epoch((self._job,), self._job.plan.world_size)

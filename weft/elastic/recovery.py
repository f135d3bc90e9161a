"""What a training job does after ranks were lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from weft.comm.flight_recorder import cause_of_hang, read_records
from weft.config.errors import ConfigErrors
from weft.elastic.failure import Epoch, Failure, RanksFailedError
from weft.report.events import EventLog
from weft.train.job import Job
from weft.train.run_folder import LOGS, REWINDS_FILE
from weft.train.run_list import last_step


class Plans(Protocol):
    """A job whose plan may change while its processes stay."""

    @property
    def job(self) -> Job:
        """Under the plan that it has now."""

    @property
    def seats(self) -> tuple[int, ...]:
        """For each rank the one that its process was under the plan before, or ``ANEW``."""

    def without(self, lost: Sequence[int]) -> str:
        """Go on with the ranks that are left; from which plan to which, and why.

        Raises:
            ConfigErrors: there is no plan for those.
        """


class Restarts:
    """Begins the job again: with new processes in the places of those that were lost, or on what is
    left.

    Args:
        tell: Says a line to the person who started the job.
        replans: Has the job under the plan of the moment, and plans for what is left.
    """

    def __init__(self, job: Job, tell: Callable[[str], None], replans: Plans | None = None) -> None:
        self._first = job
        self._tell = tell
        self._replans = replans
        self._events = EventLog(job.out, began=job.began, watches=True)
        self._in_a_row = 0
        self._furthest = 0
        self._rewinds = b""
        """As the run's folder had them."""

    @property
    def _job(self) -> Job:
        return self._first if self._replans is None else self._replans.job

    def __call__(self, failures: Sequence[Failure]) -> Epoch | None:
        """What the ranks do next; None: there were too many restarts without a new step."""
        most = self._job.config.recovery.restarts
        step = int(last_step(self._job.out / "metrics.jsonl").get("step", 0))
        rewinds = self._noted_rewinds()
        if rewinds != self._rewinds:  # what follows are new steps, though their numbers are lower
            self._rewinds, self._furthest, self._in_a_row = rewinds, 0, 0
        elif step > self._furthest:
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
        seats = self._planned_without([each.rank for each in failures if each.is_gone], step)
        return Epoch((self._job,), self._job.plan.world_size, seats)

    def _noted_rewinds(self) -> bytes:
        with suppress(OSError):
            return (self._job.out / REWINDS_FILE).read_bytes()
        return b""

    def _planned_without(self, lost: Sequence[int], step: int) -> tuple[int, ...] | None:
        """Plan for the ranks that are left; None where lost ones are replaced."""
        job, replans = self._job, self._replans
        is_asked = job.config.recovery.when_lost == "replan" and 0 < len(lost) < job.plan.world_size
        if replans is None or not is_asked:
            return None
        try:
            words = replans.without(lost)
        except ConfigErrors as errors:
            why = f"lost ranks are replaced, for there is no other plan: {errors.errors[0]}"
            self._say(why, step)
            return None
        self._say(f"the plan is now {words}", step)
        return replans.seats

    def _say(self, words: str, step: int) -> None:
        self._events.write("replan", words, step=step)
        self._tell(words)

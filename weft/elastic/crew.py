"""The processes of a job, as their launcher sees them: at work as a rank, or at the door."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

from weft.elastic.failure import GRACE_S, LOSSES, Cause, Epoch, Failure, Moves
from weft.elastic.process import Machines, Process, Source
from weft.elastic.rank_process import UNREPORTED, Begin, Heard, Word
from weft.elastic.signals import Asked

LOOK_S = 0.2
"""How soon a signal to this process is passed on to the ranks."""
DOOR_S = 30.0
"""How long a rank that heard that its epoch is over, or whose process is not up yet, may take to
come to the door: as long as a library may need to give up a call. Then another process takes its
place."""

STILL_S = 5.0
"""Of a launcher that has not looked for so long: it stood still, as after Ctrl-Z or on a machine
that slept, and so may its ranks have."""

_REPORT = ".failed-"


class Crew:
    """All processes of one job.

    Args:
        may_go_on: After ranks were lost another epoch may begin.
        heartbeat_s: If it may, a process that does not answer for so long is lost; 0: never.
    """

    def __init__(
        self,
        machines: Machines,
        folder: Path,
        *,
        may_go_on: bool,
        heartbeat_s: float,
    ) -> None:
        self._machines = machines
        self._folder = folder
        self._may_go_on = may_go_on
        self._heartbeat_s = heartbeat_s if may_go_on else 0.0
        self._name = f"{os.getpid()}-{time.monotonic_ns()}"
        self._epochs = 0
        self._looked_at = 0.0
        self._away_s = 0.0
        """How long nobody looked before the last look, beyond its own wait."""
        self._is_called = False
        self._ranks: dict[int, _Rank] = {}

    def begin(self, epoch: Epoch) -> None:
        """Tell every rank what to do. Those that outlived the epoch before keep their process, if
        the next one has a seat for them."""
        self._epochs += 1
        self._is_called = False
        attempt = f"{self._name}-{self._epochs}"
        left = {rank: each for rank, each in self._ranks.items() if each.is_at_door}
        for rank, each in self._ranks.items():
            if rank not in left:
                each.process.end()
        seats = range(epoch.world_size) if epoch.seats is None else epoch.seats
        stay = [left.pop(seat, None) for seat in seats]
        for each in left.values():  # before others take its device
            each.process.end()
        kept = [None if each is None else each.process for each in stay]
        settled = self._machines.settle(attempt, kept)
        self._ranks = {
            rank: _Rank(process, starts=kept[rank] is None)
            for rank, (process, _) in enumerate(settled)
        }
        for rank, (_, address) in enumerate(settled):
            report = self._folder / f"{_REPORT}{attempt}-{rank}.json"
            begin = Begin(
                address, epoch.args, report, epoch=self._epochs, may_go_on=self._may_go_on
            )
            self._ranks[rank].begin(begin)

    def watch(self, asked: Asked, moves: Moves | None = None) -> None:
        """Wait for the end of the epoch: for all ranks, or as long as the others may take after a
        failure. If the job may go on, they are told to come to the door; and also where ``moves``
        wants them, between two steps.

        Ranks that are asked to stop do so after their step, however long it takes; and time in
        which nobody looks, as after Ctrl-Z, is not counted.
        """
        deadline = math.inf
        passed_on = told = False
        while self._look():
            deadline += self._away_s
            if asked.times > 1:
                return
            if asked.times and not passed_on:
                passed_on = True
                self._terminate()
            self._call_between_steps(moves)
            if deadline == math.inf and any(self._failed()):
                deadline = time.monotonic() + GRACE_S
                told = not asked.times and self._call_to_the_door()
            if time.monotonic() >= deadline:
                if not told:
                    return
                self._end_those_who_do_not_come(is_late=time.monotonic() >= deadline + DOOR_S)

    @property
    def has_come(self) -> bool:
        """All ranks left between two steps, for they were wanted."""
        return all(each.has_come for each in self._ranks.values())

    @property
    def can_go_on(self) -> bool:
        """All that happened is that ranks were lost, and others can be had."""
        served = all(each.process.can_be_replaced for each in self._ranks.values())
        failures = list(self._failed())
        return bool(failures) and served and all(f.cause in LOSSES for f in failures)

    def failures(self) -> list[Failure]:
        """What happened to each rank that is not done."""
        return list(filter(None, (each.failure() for each in self._ranks.values())))

    def close(self) -> None:
        """End every process: those at the door by their own way out."""
        for each in self._ranks.values():
            each.process.tell("end")
        for each in self._ranks.values():
            if each.is_at_door:
                each.process.join(GRACE_S)
            each.process.end()

    def remove_traces(self) -> None:
        """What ranks left for one another and for us, also in an earlier job that was killed."""
        self._machines.remove_traces()
        for path in self._folder.glob(f"{_REPORT}*"):
            path.unlink(missing_ok=True)

    def _look(self) -> bool:
        """Wait a moment for what is new. Whether somebody was at work before."""
        at_work = [each for each in self._ranks.values() if each.is_at_work]
        if at_work:
            sources = dict.fromkeys(s for each in at_work for s in each.process.sources)
            wait(list[Source](sources), LOOK_S)
        now = time.monotonic()
        since_s, self._looked_at = now - self._looked_at, now
        self._away_s = max(0.0, since_s - LOOK_S)
        for each in at_work:
            each.look(self._heartbeat_s, asks_anew=since_s > STILL_S)
        return bool(at_work)

    def _terminate(self) -> None:
        """Ask all that are at work to stop."""
        for each in self._ranks.values():
            if each.is_at_work:
                each.process.terminate()

    def _call_between_steps(self, moves: Moves | None) -> None:
        """If somebody wants them. The others hear it with the totals of a step."""
        if moves is not None and moves.wanted() and not self._is_called:
            self._is_called = True
            self._ranks[0].process.tell("come")

    def _call_to_the_door(self) -> bool:
        """Tell all that the epoch is over, if another one may begin. Whether it may."""
        may_go_on = self._may_go_on and self.can_go_on
        for each in self._ranks.values() if may_go_on else ():
            each.process.tell("abort")
        return may_go_on

    def _end_those_who_do_not_come(self, *, is_late: bool) -> None:
        for each in self._ranks.values():
            may_come = each.heard or each.starts  # who is not up cannot hear yet
            if each.is_at_work and (is_late or not may_come):
                each.give_up("did not answer and had to be ended")

    def _failed(self) -> Iterator[Failure]:
        """Of those that are not at work any more."""
        over = (each for each in self._ranks.values() if not each.is_at_work)
        return filter(None, (each.failure() for each in over))


class _Rank:
    """One process, and the rank that it is in this epoch."""

    def __init__(self, process: Process, *, starts: bool) -> None:
        self.process = process
        self.starts = starts
        """It is not up yet, as far as is known."""
        self._begin: Begin | None = None
        self._word: Word | None = None
        self._given_up = ""
        """Why it had to be ended."""
        self._asked_at: float | None = None
        """When it was told to answer; None: it has."""
        self._answered_at = 0.0

    @property
    def is_at_work(self) -> bool:
        return (self._word is None or self.heard) and self.process.exitcode is None

    @property
    def is_at_door(self) -> bool:
        return not (self._word is None or self.heard) and self.process.exitcode is None

    @property
    def has_come(self) -> bool:
        """It is at the door as it was to come."""
        return self._word == "moved" and self.process.exitcode is None

    @property
    def heard(self) -> bool:
        """It was told that the epoch is over."""
        return isinstance(self._word, Heard)

    def begin(self, begin: Begin) -> None:
        self._begin, self._word = begin, None
        self._asked_at, self._answered_at = None, time.monotonic()
        self.process.tell(begin)

    def look(self, heartbeat_s: float, *, asks_anew: bool) -> None:
        """Read what it said; end it where it has not answered for so long, if that is not 0.

        ``asks_anew``: nobody could answer for a while.
        """
        for word in self.process.words() if self.is_at_work else ():
            self._hear(word)
            if not self.is_at_work:
                break  # what it said before it came is of no use
        if asks_anew:
            self._asked_at = None
        if heartbeat_s and self.is_at_work:
            self._must_answer(heartbeat_s)

    def _hear(self, word: Word) -> None:
        assert self._begin is not None, "it has been a rank"
        self.starts = False
        match word:
            case "alive":
                self._asked_at, self._answered_at = None, time.monotonic()
            case Heard(epoch) if epoch != self._begin.epoch:
                pass  # it was told when it was at the door already
            case _:
                self._word = word

    def _must_answer(self, heartbeat_s: float) -> None:
        now = time.monotonic()
        if self._asked_at is not None and now > self._asked_at + heartbeat_s:
            limit = f"{heartbeat_s:g} s (recovery.heartbeat_s)"
            self.give_up(f"did not answer for {limit} and had to be ended")
        elif self._asked_at is None and now > self._answered_at + heartbeat_s / 4:
            self._asked_at = now
            self.process.tell("ping")

    def give_up(self, why: str) -> None:
        self._given_up = why
        self.process.end()

    def failure(self) -> Failure | None:
        """How its rank failed; None for one that is done."""
        found = self._failure()
        return found and replace(found, is_gone=self.process.exitcode is not None)

    def _failure(self) -> Failure | None:
        assert self._begin is not None, "it has been a rank"
        code = self.process.exitcode
        if self._word == "done" or code == 0 or (self._word == "moved" and code is None):
            return None
        phase = self.process.phase()
        if isinstance(self._word, Failure):
            return replace(self._word, phase=phase)
        report = self.process.report()
        if report is not None:
            return replace(report, phase=phase)
        cause, text = self._unsaid(code)
        return Failure(self._begin.address.rank, cause, text, phase=phase)

    def _unsaid(self, code: int | None) -> tuple[Cause, str]:
        if code is None:
            return "peer", "was still waiting for the others and had to be ended"
        if self._given_up:
            return "peer", self._given_up
        if code == UNREPORTED:
            return "machine", "could leave no report in the run folder; it is printed above"
        if self.process.loss:
            return "signal", self.process.loss
        if code < 0:
            return "signal", f"was ended by {signal.Signals(-code).name} from outside"
        return "signal", f"ended with exit code {code} and said nothing"

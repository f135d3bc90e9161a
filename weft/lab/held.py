"""A job that goes on while it is told to and stands still in between, in a lab or without one.

Several of them take turns on one machine, each for a moment, so that what else it does slows all of
them alike. Nothing that ranks measure may depend on how long they stand still.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Protocol, Self

from weft.cluster.cluster_file import ClusterFile
from weft.config.errors import RunError
from weft.lab.lab import Lab
from weft.lab.ranks import RankProcess
from weft.lab.steps import Moment, Steps
from weft.report.events import EVENTS_FILE, read_events

LOOK_S = 0.005
"""How soon a step is seen. A chip of the lab has a turn on its core as often."""
METRICS = "metrics.jsonl"
"""In the run folder."""


class Place(Protocol):
    """Where the ranks of a job run: a lab, or this machine as it is."""

    ranks: list[RankProcess]

    def built(self) -> AbstractContextManager[None]:
        """While this lasts, it is there; afterwards no rank is left."""

    def start(self, command: Sequence[str], out: Path, *, quiet: bool) -> None:
        """Start the command once for every rank."""

    def look(self, now_s: float) -> bool:
        """See which ranks have ended; have all?"""

    def used_s(self) -> tuple[float, ...]:
        """Processor time of every rank so far; 0 for one that has ended."""

    def hold(self) -> None:
        """No rank does anything until all may go on."""

    def go_on(self) -> None:
        """Ranks that were held."""


class HeldJob:
    """A context manager: while it lasts, the job is there.

    Args:
        number: Of its lab, in this process.
        place: Where it runs instead of a lab.
    """

    def __init__(
        self,
        cluster: ClusterFile,
        command: Sequence[str],
        out: Path,
        number: int,
        place: Place | None = None,
    ) -> None:
        self._command, self._out = command, out
        self._lab: Place = place or Lab(cluster, number=number)
        self._steps = Steps(out / METRICS)
        self._stack = ExitStack()
        self._held_s = 0.0
        """All in all, until it last went on."""
        self._held_before_s = 0.0
        """Likewise until it went on the time before."""
        self._held_at: float | None = None
        """None: it goes on."""
        self.moments: list[Moment] = []
        """When it was ready, and when each step was seen to be done, by a clock that stands still
        with it."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._lab.built())
            self._lab.start(self._command, self._out, quiet=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def step(self) -> int:
        """How many are done."""
        return self.moments[-1].step if self.moments else 0

    @property
    def has_ended(self) -> bool:
        """Some rank has: it trains no more."""
        return any(rank.code is not None for rank in self._lab.ranks)

    @property
    def failed(self) -> int | None:
        """The rank that ended first, or ran out of memory."""
        ended = [rank for rank in self._lab.ranks if rank.code is not None]
        ended.sort(key=lambda rank: (not rank.killed_for_memory, rank.ended_s))
        return ended[0].rank if ended else None

    @property
    def is_short(self) -> bool:
        """A rank was killed as its chip was out of memory."""
        return any(rank.killed_for_memory for rank in self._lab.ranks)

    def in_words(self, rank: int) -> str:
        """How a rank ended."""
        return self._lab.ranks[rank].in_words()

    def code(self, rank: int) -> int | None:
        """Its exit code."""
        return self._lab.ranks[rank].code

    def is_ready(self) -> bool:
        """It is about to train, or does, and stands still; or it has ended."""
        if self._look() or self.moments:
            return True
        if any(event.kind == "start" for event in read_events(self._out / EVENTS_FILE)):
            self._hold()  # it may have done steps before anybody looked
            done = self._steps.look()
            self.moments.append(Moment(done, self._steps.elapsed_s, self._lab.used_s()))
        return bool(self.moments)

    def run(self, seconds: float, step: int) -> bool:
        """Let it go on for so long, or until that step is done. Is it done, or will it never be?"""
        assert self._held_at is not None, "it goes on"
        now = time.monotonic()
        self._held_before_s = self._held_s
        self._held_s, self._held_at = self._held_s + now - self._held_at, None
        self._lab.go_on()
        while not self._look() and self.step < step and time.monotonic() < now + seconds:
            time.sleep(LOOK_S)
        self._hold()
        return self._look() or self.step >= step

    def _hold(self) -> None:
        self._lab.hold()
        self._held_at = time.monotonic()

    def _look(self) -> bool:
        """At steps and ranks. Has one ended?"""
        if self.moments and self._steps.look() > self.step:
            now_s = self._steps.elapsed_s - self._held_s
            if now_s < self.moments[-1].now_s:  # done before it last stood still, said after that
                now_s = self._steps.elapsed_s - self._held_before_s
            self.moments.append(Moment(self._steps.last, now_s, self._lab.used_s()))
        self._lab.look(time.monotonic())
        return self.has_ended


def await_ready(jobs: Sequence[HeldJob], limit_s: float) -> None:
    """Until each is about to train, or has ended.

    Raises:
        RunError: one is not within so long.
    """
    deadline = time.monotonic() + limit_s
    waiting = list(jobs)
    while waiting := [job for job in waiting if not job.is_ready()]:
        if time.monotonic() > deadline:
            raise RunError(f"a job of the lab does not begin to train within {limit_s:g} s")
        time.sleep(LOOK_S)

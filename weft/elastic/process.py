"""A process that can be a rank, as its launcher sees it: on this machine, or on another one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Protocol

from weft.comm.address import RankAddress
from weft.config.errors import RunError
from weft.elastic.failure import Failure
from weft.elastic.rank_process import Begin, Order, Target, Word, be_ranks

Source = int | Connection
_LOST = 255
"""Of a process, by ``multiprocessing``, where the server that it was forked from is gone."""
_SERVER = "the process that ranks are forked from"


class Process(Protocol):
    """It may be a rank of one epoch after another."""

    @property
    def exitcode(self) -> int | None:
        """None while it is up; below 0: minus the signal that ended it."""

    @property
    def loss(self) -> str:
        """Why it is gone where that says more than its exit code; else empty."""

    @property
    def can_be_replaced(self) -> bool:
        """Another one may be started where this one is gone."""

    @property
    def sources(self) -> Sequence[Source]:
        """What becomes ready when there is something to look at."""

    def tell(self, order: Order) -> None:
        """To a process that is gone, nothing."""

    def words(self) -> Iterator[Word]:
        """What it has said since, without waiting."""

    def phase(self) -> str:
        """Of its rank's life; empty where it did not say."""

    def report(self) -> Failure | None:
        """What it left for the launcher as it gave up its job."""

    def terminate(self) -> None:
        """Ask it to stop."""

    def join(self, timeout_s: float) -> None:
        """Wait for its end."""

    def end(self) -> None:
        """At once, and be done with it."""


class LocalProcess:
    """Forked from the warm server of this machine."""

    def __init__(self, target: Target, logs: Path, context: ForkServerContext) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=be_ranks, args=(target, logs, theirs), name="rank")
        try:
            self._process.start()
        except (EOFError, ConnectionError) as error:
            raise RunError(f"{_SERVER} was ended from outside") from error
        theirs.close()
        self._begin: Begin | None = None

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode

    @property
    def loss(self) -> str:
        return "" if self.can_be_replaced else f"is lost: {_SERVER} was ended from outside"

    @property
    def can_be_replaced(self) -> bool:
        return self._process.exitcode != _LOST

    @property
    def sources(self) -> Sequence[Source]:
        return self._process.sentinel, self._pipe

    def tell(self, order: Order) -> None:
        if isinstance(order, Begin):
            self._begin = order
        with suppress(OSError):
            self._pipe.send(order)

    def words(self) -> Iterator[Word]:
        with suppress(EOFError, OSError):
            while self._pipe.poll():
                yield self._pipe.recv()

    def phase(self) -> str:
        file = self._begin.address.phase_file if self._begin is not None else None
        return file.read_text() if file is not None and file.exists() else ""

    def report(self) -> Failure | None:
        if self._begin is None or not self._begin.report.exists():
            return None
        return Failure(**json.loads(self._begin.report.read_text()))

    def terminate(self) -> None:
        self._process.terminate()

    def join(self, timeout_s: float) -> None:
        self._process.join(timeout_s)

    def end(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._pipe.close()


class Machines(Protocol):
    """Where the processes of a job run, and where the ranks of an epoch meet."""

    def settle(
        self, epoch: str, kept: Sequence[Process | None]
    ) -> Sequence[tuple[Process, RankAddress]]:
        """For each rank the process that it is from now on, and its address.

        Args:
            epoch: Its name, among all jobs of a folder.
            kept: For each rank the process that is at the door for it; None: another one is to be.
        """

    def remove_traces(self) -> None:
        """What ranks left for one another, also in an earlier job that was killed."""


_MEETING = ".meet-"
PHASE = ".phase-"


class ThisMachine:
    """All ranks of a job are here, and meet at a file of its folder."""

    def __init__(
        self, target: Target, folder: Path, logs: Path, context: ForkServerContext
    ) -> None:
        self._target, self._folder, self._logs, self._context = target, folder, logs, context

    def settle(
        self, epoch: str, kept: Sequence[Process | None]
    ) -> Sequence[tuple[Process, RankAddress]]:
        return [
            (
                process or LocalProcess(self._target, self._logs, self._context),
                RankAddress(
                    rank=rank,
                    world_size=len(kept),
                    local_rank=rank,
                    store_file=self._folder / f"{_MEETING}{epoch}",
                    phase_file=self._folder / f"{PHASE}{epoch}-{rank}",
                ),
            )
            for rank, process in enumerate(kept)
        ]

    def remove_traces(self) -> None:
        for pattern in (f"{_MEETING}*", f"{PHASE}*"):
            for path in self._folder.glob(pattern):
                path.unlink(missing_ok=True)

"""Start the ranks of a job on this machine, watch them, and say which one failed first and why.

Ranks fork from a server process that has imported PyTorch once, so they are up in a tenth of a
second each instead of two.
"""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from weft.comm.address import RankAddress
from weft.comm.errors import CommError
from weft.comm.flight import read_flights, remove_flights, who_waits
from weft.config.errors import ConfigError, ConfigErrors, RunError
from weft.elastic.failure import Cause, EndAfterFirst, Failure, FailurePolicy, RanksFailedError
from weft.elastic.parent import end_with_parent
from weft.elastic.signals import Asked
from weft.train.stop import interrupts_held

LOOK_S = 0.2
"""How soon a signal to this process is passed on to the ranks."""

_MEETING = ".meet-"
_REPORT = ".failed-"
_PHASE = ".phase-"

Target = Callable[..., None] | str
"""Called as ``target(address, *args)`` in every rank; ``"module:name"`` is imported there alone."""


def warm_context(preload: Sequence[str] = ("weft.train.worker",)) -> ForkServerContext:
    """The process context of a job. Its server begins to import at once; the caller goes on.

    Ctrl-C does not reach the server and what it forks: this process passes it on.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with interrupts_held():
        forkserver.ensure_running()
    return context


def run_ranks(
    target: Target,
    args: tuple[Any, ...],
    world_size: int,
    *,
    folder: Path,
    context: ForkServerContext | None = None,
    policy: FailurePolicy | None = None,
) -> None:
    """Run ``target`` in ``world_size`` processes of this machine until all have ended.

    Rank 0 keeps the terminal; the others write to ``folder/logs/rank*.log``. No other job may run
    in ``folder`` at the same time. Ctrl-C or SIGTERM asks the ranks to stop, by SIGTERM, and is no
    failure; a second one ends them at once. If this process is killed, they end by themselves.

    Args:
        context: What ``warm_context`` returned, if it was called early to save time.
        policy: What happens after a rank failed; None: ``EndAfterFirst``.

    Raises:
        RanksFailedError: a rank failed. The others have been ended.
    """
    context = context or warm_context()
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    _remove_traces(folder)
    remove_flights(logs)
    attempt = f"{os.getpid()}-{time.monotonic_ns()}"
    ranks = [
        _Rank(
            RankAddress(
                rank=rank,
                world_size=world_size,
                local_rank=rank,
                store_file=folder / f"{_MEETING}{attempt}",
                phase_file=folder / f"{_PHASE}{attempt}-{rank}",
            ),
            report=folder / f"{_REPORT}{attempt}-{rank}.json",
        )
        for rank in range(world_size)
    ]
    asked = Asked()
    with asked.handlers():
        try:
            for rank in ranks:
                rank.start(context, (target, rank.address, args, logs, rank.report))
            _watch(ranks, asked, policy or EndAfterFirst())
            failures = [failure for rank in ranks if (failure := rank.failure()) is not None]
        finally:
            for rank in ranks:
                rank.end()
            _remove_traces(folder)
    stopped = asked.times > 0 and all(f.cause in ("signal", "peer") for f in failures)
    if failures and not stopped:
        raise RanksFailedError(failures, who_waits(read_flights(logs)))


def run_rank(target: Target, address: RankAddress, args: tuple[Any, ...], *, folder: Path) -> None:
    """Be one rank of a job that torchrun, srun or another launcher started and watches.

    Ends the process with one line where another rank failed: that rank's error is the one to read.
    """
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if address.rank > 0:
        _redirect(logs / f"rank{address.rank}.log")
    try:
        _find(target)(address, *args)
    except CommError as error:
        sys.stderr.write(f"rank {address.rank} gave up, because another rank did: {error}\n")
        stuck = read_flights(logs)
        if address.rank == min(stuck, default=None):
            sys.stderr.write(f"{who_waits(stuck)}\n")
        sys.stderr.flush()
        os._exit(1)


@dataclass(slots=True)
class _Rank:
    """One rank as its launcher sees it."""

    address: RankAddress
    report: Path
    """Where it says how it failed."""
    process: BaseProcess | None = None
    """None until it was started."""

    def start(self, context: ForkServerContext, args: tuple[Any, ...]) -> None:
        process = context.Process(target=_rank_main, args=args, name=f"rank{self.address.rank}")
        process.start()
        self.process = process

    def end(self) -> None:
        if self.process is None:
            return
        if self.process.is_alive():
            self.process.kill()
        self.process.join()

    def failure(self) -> Failure | None:
        """How it failed; None for a rank that ended well."""
        process, rank = self.process, self.address.rank
        if process is None or process.exitcode == 0:
            return None
        phase = self._phase()
        if self.report.exists():
            return replace(Failure(**json.loads(self.report.read_text())), phase=phase)
        cause: Cause = "signal"
        if process.exitcode is None:
            cause, text = "peer", "was still waiting for the others and had to be ended"
        elif process.exitcode < 0:
            text = f"was ended by {signal.Signals(-process.exitcode).name} from outside"
        else:
            text = f"ended with exit code {process.exitcode} and said nothing"
        return Failure(rank, cause, text, phase=phase)

    def _phase(self) -> str:
        file = self.address.phase_file
        return file.read_text() if file is not None and file.exists() else ""


def _watch(ranks: Sequence[_Rank], asked: Asked, policy: FailurePolicy) -> None:
    """Wait for all to end, or as long as the policy says after a failure.

    Ranks that are asked to stop do so after their step, however long it takes.
    """
    deadline = math.inf
    passed_on = False
    told: set[int] = set()
    processes = [rank.process for rank in ranks if rank.process is not None]
    while alive := [process for process in processes if process.is_alive()]:
        timeout = min(LOOK_S, max(0.0, deadline - time.monotonic()))
        wait([process.sentinel for process in alive], timeout)
        if time.monotonic() >= deadline or asked.times > 1:
            return
        if asked.times and not passed_on:
            passed_on = True
            for process in alive:
                process.terminate()
        for failure in _new_failures(ranks, told):
            answer = policy.on_failure(failure)
            deadline = min(deadline, time.monotonic() + answer.grace_s)


def _new_failures(ranks: Sequence[_Rank], told: set[int]) -> list[Failure]:
    """Of ranks that have ended and were not told before."""
    found = []
    for rank in ranks:
        number = rank.address.rank
        has_ended = rank.process is not None and rank.process.exitcode is not None
        if number not in told and has_ended and (failure := rank.failure()) is not None:
            told.add(number)
            found.append(failure)
    return found


def _rank_main(
    target: Target, address: RankAddress, args: tuple[Any, ...], logs: Path, report: Path
) -> None:
    """First code of a rank: output to its log, exceptions to a report that the parent reads."""
    end_with_parent()
    if address.rank > 0:
        _redirect(logs / f"rank{address.rank}.log")
    try:
        _find(target)(address, *args)
    except KeyboardInterrupt:
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - reported in full to the parent
        failure = _described(address.rank, error)
        if failure.detail:
            (logs / f"rank{address.rank}.error").write_text(failure.detail)
        temporary = report.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(failure)))
        temporary.replace(report)
        # Not sys.exit: waiting for communication threads whose peer is gone could hang.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2 if failure.cause == "config" else 1)


def _described(rank: int, error: Exception) -> Failure:
    """A failure whose message is all there is to say, or one with a traceback."""
    causes: dict[type, Cause] = {
        ConfigError: "config",
        ConfigErrors: "config",
        CommError: "peer",
        RunError: "machine",
    }
    for kind, cause in causes.items():
        if isinstance(error, kind):
            return Failure(rank, cause, str(error), when=time.time())
    text = f"{type(error).__name__}: {error}"
    return Failure(rank, "error", text, traceback.format_exc(), time.time())


def _remove_traces(folder: Path) -> None:
    """What ranks left for one another and for us, also in an earlier job that was killed."""
    for pattern in (f"{_MEETING}*", f"{_REPORT}*", f"{_PHASE}*"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def _find(target: Target) -> Callable[..., None]:
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    found: Callable[..., None] = vars(importlib.import_module(module))[name]
    return found


def _redirect(path: Path) -> None:
    """Send this process's standard output and error to a file, C libraries included."""
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

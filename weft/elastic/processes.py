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
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from weft.comm.address import RankAddress
from weft.comm.errors import CommError
from weft.comm.flight import read_flights, remove_flights, who_waits
from weft.config.errors import ConfigError, ConfigErrors, RunError
from weft.elastic.parent import end_with_parent
from weft.elastic.signals import Asked
from weft.train.stop import interrupts_held

GRACE_S = 3.0
"""How long the other ranks may take to notice a failure and say what they saw."""
LOOK_S = 0.2
"""How soon a signal to this process is passed on to the ranks."""

Cause = Literal["config", "error", "machine", "peer", "signal"]


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank ended when it did not end well."""

    rank: int
    cause: Cause
    """A value the user wrote; an exception; a disk or a file (``RunError``); a collective that
    lost its peer; a signal."""
    message: str
    detail: str = ""
    """Traceback of an exception; empty where the message says all."""
    when: float = 0.0


class RanksFailedError(RuntimeError):
    """At least one rank failed; ``first`` is the one that brought the others down.

    ``waits``: where no rank says more than that it lost another, who waited for whom.
    """

    def __init__(self, failures: Sequence[Failure], waits: str | None = None) -> None:
        order: dict[Cause, int] = {"config": 0, "signal": 1, "error": 2, "machine": 2, "peer": 3}
        self.failures = sorted(failures, key=lambda f: (order[f.cause], f.when, f.rank))
        self.first = self.failures[0]
        self.waits = waits if self.first.cause == "peer" else None
        super().__init__(self.waits or f"rank {self.first.rank}: {self.first.message}")


_MEETING = ".meet-"
_REPORT = ".failed-"

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
) -> None:
    """Run ``target`` in ``world_size`` processes of this machine until all have ended.

    Rank 0 keeps the terminal; the others write to ``folder/logs/rank*.log``. No other job may run
    in ``folder`` at the same time. Ctrl-C or SIGTERM asks the ranks to stop, by SIGTERM, and is no
    failure; a second one ends them at once. If this process is killed, they end by themselves.

    Args:
        context: What ``warm_context`` returned, if it was called early to save time.

    Raises:
        RanksFailedError: a rank failed. The others have been ended.
    """
    context = context or warm_context()
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    _remove_traces(folder)
    remove_flights(logs)
    attempt = f"{os.getpid()}-{time.monotonic_ns()}"
    store_file = folder / f"{_MEETING}{attempt}"
    reports = [folder / f"{_REPORT}{attempt}-{rank}.json" for rank in range(world_size)]
    processes: list[BaseProcess] = []
    asked = Asked()
    with asked.handlers():
        try:
            for rank in range(world_size):
                address = RankAddress(
                    rank=rank, world_size=world_size, local_rank=rank, store_file=store_file
                )
                process = context.Process(
                    target=_rank_main,
                    args=(target, address, args, logs, reports[rank]),
                    name=f"rank{rank}",
                )
                process.start()
                processes.append(process)
            _watch(processes, asked)
            failures = _failures(processes, reports)
        finally:
            _end(processes)
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


def _watch(processes: Sequence[BaseProcess], asked: Asked) -> None:
    """Wait for all to end, or for the first failure and a moment for the others to react.

    Ranks that are asked to stop do so after their step, however long it takes.
    """
    deadline = math.inf
    passed_on = False
    while alive := [process for process in processes if process.is_alive()]:
        timeout = min(LOOK_S, max(0.0, deadline - time.monotonic()))
        wait([process.sentinel for process in alive], timeout)
        if time.monotonic() >= deadline or asked.times > 1:
            return
        if asked.times and not passed_on:
            passed_on = True
            for process in alive:
                process.terminate()
        if deadline == math.inf and any(process.exitcode for process in processes):
            deadline = time.monotonic() + GRACE_S


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _failures(processes: Sequence[BaseProcess], reports: Sequence[Path]) -> list[Failure]:
    found = [
        _failure(rank, process, report)
        for rank, (process, report) in enumerate(zip(processes, reports, strict=True))
    ]
    return [failure for failure in found if failure is not None]


def _failure(rank: int, process: BaseProcess, report: Path) -> Failure | None:
    if process.exitcode == 0:
        return None
    if report.exists():
        return Failure(**json.loads(report.read_text()))
    if process.exitcode is None:
        return Failure(rank, "peer", "was still waiting for the others and had to be ended")
    if process.exitcode < 0:
        name = signal.Signals(-process.exitcode).name
        return Failure(rank, "signal", f"was ended by {name} from outside")
    return Failure(rank, "signal", f"ended with exit code {process.exitcode} and said nothing")


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
    """Meeting files and reports, also of an earlier job that was killed."""
    for pattern in (f"{_MEETING}*", f"{_REPORT}*"):
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

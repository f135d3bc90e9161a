"""Start the ranks of a job on this machine, watch them, and say which one failed first and why.

Ranks fork from a server process that has imported PyTorch once, so they are up in a tenth of a
second each instead of two.
"""

from __future__ import annotations

import importlib
import json
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

from weft.comm.errors import CommError
from weft.comm.place import Place
from weft.config.errors import ConfigError

GRACE_S = 3.0
"""How long the other ranks may take to notice a failure and say what they saw."""

Cause = Literal["config", "error", "peer", "signal"]


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank ended when it did not end well."""

    rank: int
    cause: Cause
    """A value the user wrote; an exception; a collective that lost its peer; a signal."""
    message: str
    detail: str = ""
    """Traceback."""
    when: float = 0.0


class RanksFailedError(RuntimeError):
    """At least one rank failed; ``first`` is the one that brought the others down."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        order: dict[Cause, int] = {"config": 0, "signal": 1, "error": 2, "peer": 3}
        self.failures = sorted(failures, key=lambda f: (order[f.cause], f.when, f.rank))
        self.first = self.failures[0]
        super().__init__(f"rank {self.first.rank}: {self.first.message}")


Target = Callable[..., None] | str
"""Called as ``target(place, *args)`` in every rank; ``"module:name"`` is imported there alone."""


def warm_context(preload: Sequence[str] = ("weft.train.worker",)) -> ForkServerContext:
    """The process context of a job. Its server begins to import at once; the caller goes on."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
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

    ``folder`` gets ``logs/rankN.log`` (everything a rank prints, except rank 0, which keeps the
    terminal) and short-lived files for meeting and for error reports.

    Raises:
        RanksFailedError: a rank failed. The others have been ended.
        KeyboardInterrupt: after a second Ctrl-C; the ranks have been ended.
    """
    context = context or warm_context()
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    attempt = f"{os.getpid()}-{time.monotonic_ns()}"
    store_file = folder / f".meet-{attempt}"
    reports = [folder / f".failed-{attempt}-{rank}.json" for rank in range(world_size)]
    processes: list[BaseProcess] = []
    try:
        for rank in range(world_size):
            place = Place(rank=rank, world_size=world_size, local_rank=rank, store_file=store_file)
            process = context.Process(
                target=_rank_main,
                args=(target, place, args, logs, reports[rank]),
                name=f"rank{rank}",
            )
            process.start()
            processes.append(process)
        _watch(processes)
        failures = [
            failure
            for rank, process in enumerate(processes)
            if (failure := _failure(rank, process, reports[rank])) is not None
        ]
        if failures:
            raise RanksFailedError(failures)
    finally:
        _end(processes)
        for path in (store_file, *reports):
            path.unlink(missing_ok=True)


def run_rank(target: Target, place: Place, args: tuple[Any, ...], *, folder: Path) -> None:
    """Be one rank of a job that torchrun, srun or another launcher started and watches.

    Ends the process with one line where another rank failed: that rank's error is the one to read.
    """
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if place.rank > 0:
        _redirect(logs / f"rank{place.rank}.log")
    try:
        _find(target)(place, *args)
    except CommError as error:
        sys.stderr.write(f"rank {place.rank} gave up, because another rank did: {error}\n")
        sys.stderr.flush()
        os._exit(1)


def _watch(processes: Sequence[BaseProcess]) -> None:
    """Wait for all to end, or for the first failure and a moment for the others to react.

    The terminal sends Ctrl-C to every rank too: they stop after their step, so wait for them.
    """
    interrupts = 0
    deadline: float | None = None
    while alive := [process for process in processes if process.is_alive()]:
        try:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            wait([process.sentinel for process in alive], timeout)
        except KeyboardInterrupt:
            interrupts += 1
            if interrupts > 1:
                raise
        if deadline is not None and time.monotonic() >= deadline:
            return
        if deadline is None and any(process.exitcode for process in processes):
            deadline = time.monotonic() + GRACE_S


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


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
    target: Target, place: Place, args: tuple[Any, ...], logs: Path, report: Path
) -> None:
    """First code of a rank: output to its log, exceptions to a report that the parent reads."""
    if place.rank > 0:
        _redirect(logs / f"rank{place.rank}.log")
    try:
        _find(target)(place, *args)
    except KeyboardInterrupt:
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - reported in full to the parent
        detail = traceback.format_exc()
        (logs / f"rank{place.rank}.error").write_text(detail)
        causes: dict[type, Cause] = {ConfigError: "config", CommError: "peer"}
        known = [cause for kind, cause in causes.items() if isinstance(error, kind)]
        cause: Cause = known[0] if known else "error"
        text = str(error) if cause != "error" else f"{type(error).__name__}: {error}"
        failure = Failure(place.rank, cause, text, detail, time.time())
        temporary = report.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(failure)))
        temporary.replace(report)
        # Not sys.exit: waiting for communication threads whose peer is gone could hang.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2 if cause == "config" else 1)


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

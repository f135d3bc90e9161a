"""Start the ranks of a job on this machine, watch them, and say which one failed first and why.

Ranks fork from a server process that has imported PyTorch once, so they are up in a tenth of a
second each instead of two.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pkgutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import forkserver, parent_process
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from weft.comm.address import RankAddress
from weft.comm.errors import CommError
from weft.comm.flight_recorder import (
    cause_of_hang,
    is_first_of_records,
    read_records,
    remove_records,
)
from weft.config.errors import ConfigError, ConfigErrors, DivergedError, RunError
from weft.elastic.failure import Cause, Failure, Policy, RanksFailedError, end_after_first
from weft.elastic.signals import Asked
from weft.train.stop import signals_held

LOOK_S = 0.2
"""How soon a signal to this process is passed on to the ranks."""

_MEETING = ".meet-"
_REPORT = ".failed-"
_PHASE = ".phase-"
_UNREPORTED = 3
"""Exit code of a rank that could leave no report: what it had to say is on the terminal."""
_HELD_BACK = {signal.SIGTERM, signal.SIGUSR1}
"""By the server that ranks are forked from."""
_LOST = 255
"""Of a rank, by ``multiprocessing``, where the server that it was forked from is gone."""

Target = Callable[..., None] | str
"""Called as ``target(address, *args)`` in every rank; ``"module:name"`` is imported there alone."""


_PRELOADED = ("weft.train.worker", "torch.fx.experimental.symbolic_shapes")
"""Imported once and before ranks fork. PyTorch imports the second, and sympy with it, in the first
backward pass: half a second in every rank."""


def warm_context(preload: Sequence[str] = _PRELOADED) -> ForkServerContext:
    """The process context of a job. Its server begins to import at once; the caller goes on.

    Ctrl-C and SIGTERM to a whole group do not reach the server: this process passes them on to
    what was forked.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with signals_held():
        forkserver.ensure_running()
    return context


def run_ranks(
    target: Target,
    args: tuple[Any, ...],
    world_size: int,
    *,
    folder: Path,
    context: ForkServerContext | None = None,
    policy: Policy = end_after_first,
) -> None:
    """Run ``target`` in ``world_size`` processes of this machine until all have ended.

    Rank 0 keeps the terminal; the others write to ``folder/logs/rank*.log``. No other job may run
    in ``folder`` at the same time. Ctrl-C or SIGTERM asks the ranks to stop, by SIGTERM, and is no
    failure; a second one ends them at once. If this process is killed, they end by themselves.

    Args:
        context: What ``warm_context`` returned, if it was called early to save time.
        policy: What happens after a rank failed.

    Raises:
        RanksFailedError: a rank failed. The others have been ended.
    """
    context = context or warm_context()
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    _remove_traces(folder)
    remove_records(logs)
    attempt = f"{os.getpid()}-{time.monotonic_ns()}"
    ranks = []
    for rank in range(world_size):
        address = RankAddress(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            store_file=folder / f"{_MEETING}{attempt}",
            phase_file=folder / f"{_PHASE}{attempt}-{rank}",
        )
        report = folder / f"{_REPORT}{attempt}-{rank}.json"
        process = context.Process(
            target=_rank_main, args=(target, address, args, logs, report), name=f"rank{rank}"
        )
        ranks.append(_Rank(address, report, process))
    asked = Asked()
    with asked.handlers():
        try:
            for each in ranks:
                each.process.start()
            _watch(ranks, asked, policy)
            failures = [failure for each in ranks if (failure := each.failure()) is not None]
        finally:
            for each in ranks:
                each.end()
            _remove_traces(folder)
    stopped = asked.times > 0 and all(f.cause in ("signal", "peer") for f in failures)
    if failures and not stopped:
        raise RanksFailedError(failures, cause_of_hang(read_records(logs)))


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
        if is_first_of_records(logs, address.rank):
            sys.stderr.write(f"{cause_of_hang(read_records(logs))}\n")
        sys.stderr.flush()
        os._exit(1)


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank as its launcher sees it."""

    address: RankAddress
    report: Path
    """Where it says how it failed."""
    process: BaseProcess

    def end(self) -> None:
        if self.process.pid is None:  # it was never started
            return
        if self.process.is_alive():
            self.process.kill()
        self.process.join()

    def failure(self) -> Failure | None:
        """How it failed; None for a rank that ended well."""
        code, file = self.process.exitcode, self.address.phase_file
        if code == 0:
            return None
        phase = file.read_text() if file is not None and file.exists() else ""
        if self.report.exists():
            return replace(Failure(**json.loads(self.report.read_text())), phase=phase)
        cause: Cause = "signal"
        if code is None:
            cause, text = "peer", "was still waiting for the others and had to be ended"
        elif code < 0:
            text = f"was ended by {signal.Signals(-code).name} from outside"
        elif code == _UNREPORTED:
            cause, text = "machine", "could leave no report in the run folder; it is printed above"
        elif code == _LOST:
            text = "is lost: the process that ranks are forked from was ended from outside"
        else:
            text = f"ended with exit code {code} and said nothing"
        return Failure(self.address.rank, cause, text, phase=phase)


def _watch(ranks: Sequence[_Rank], asked: Asked, policy: Policy) -> None:
    """Wait for all to end, or as long as the policy says after a failure.

    Ranks that are asked to stop do so after their step, however long it takes.
    """
    deadline = math.inf
    passed_on = False
    running = list(ranks)
    while running:
        timeout = min(LOOK_S, max(0.0, deadline - time.monotonic()))
        wait([rank.process.sentinel for rank in running], timeout)
        if time.monotonic() >= deadline or asked.times > 1:
            return
        if asked.times and not passed_on:
            passed_on = True
            for rank in running:
                rank.process.terminate()
        ended = [rank for rank in running if rank.process.exitcode is not None]
        running = [rank for rank in running if rank not in ended]
        for failure in filter(None, (rank.failure() for rank in ended)):
            deadline = min(deadline, time.monotonic() + policy(failure))


def end_with_parent() -> None:
    """End this process as soon as the one that started it is gone, however that one ended.

    Nobody would read how it ended, or end it. A thread waits for the end of a pipe that only the
    parent holds open; it costs nothing.
    """
    parent = parent_process()
    assert parent is not None, "only a process that another one started has a parent"
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def _rank_main(
    target: Target, address: RankAddress, args: tuple[Any, ...], logs: Path, report: Path
) -> None:
    """First code of a rank: output to its log, exceptions to a report that the parent reads."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)
    end_with_parent()
    terminal = os.dup(2)
    if address.rank > 0:
        _redirect(logs / f"rank{address.rank}.log")
    try:
        _find(target)(address, *args)
    except KeyboardInterrupt:
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - reported in full to the parent
        failure = _described(address.rank, error)
        try:
            _leave(failure, logs, report)
        except OSError:  # such as the full disk that it failed for
            said = f"error: rank {address.rank}: {failure.message}\n{failure.detail}"
            os.write(terminal, said.encode(errors="replace"))
            os._exit(_UNREPORTED)
        # Not sys.exit: waiting for communication threads whose peer is gone could hang.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2 if failure.cause == "config" else 1)


def _leave(failure: Failure, logs: Path, report: Path) -> None:
    """For a person who looks at the logs, and for the parent."""
    temporary = report.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(failure)))
    temporary.replace(report)
    if failure.detail:
        (logs / f"rank{failure.rank}.error").write_text(failure.detail)


def _described(rank: int, error: Exception) -> Failure:
    """A failure whose message is all there is to say, or one with a traceback."""
    cause: Cause
    match error:
        case ConfigError() | ConfigErrors():
            cause = "config"
        case CommError():
            cause = "peer"
        case DivergedError():
            cause = "diverged"
        case RunError():
            cause = "machine"
        case _:
            text = f"{type(error).__name__}: {error}"
            return Failure(rank, "error", text, traceback.format_exc(), time.time())
    return Failure(rank, cause, str(error), when=time.time())


def _remove_traces(folder: Path) -> None:
    """What ranks left for one another and for us, also in an earlier job that was killed."""
    for pattern in (f"{_MEETING}*", f"{_REPORT}*", f"{_PHASE}*"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def _find(target: Target) -> Callable[..., None]:
    return pkgutil.resolve_name(target) if isinstance(target, str) else target


def _redirect(path: Path) -> None:
    """Send this process's standard output and error to a file, C libraries included."""
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

"""A process that is a rank of one epoch after another, as its launcher says through a pipe.

After an epoch it comes to the door: it says how that ended, and waits for what is next. So those
that outlive a lost rank keep their process.
"""

from __future__ import annotations

import gc
import json
import os
import pkgutil
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NoReturn

from weft.comm.abort import Abort
from weft.comm.address import RankAddress
from weft.comm.errors import CommError
from weft.config.errors import ConfigError, ConfigErrors, DivergedError, RunError, no_room
from weft.elastic.failure import Cause, Failure
from weft.train.stop import own_stop

UNREPORTED = 3
"""Exit code of a rank that could leave no report: what it had to say is on the terminal."""

_HELD_BACK = {signal.SIGTERM, signal.SIGUSR1}
"""By the server that ranks are forked from."""

Target = Callable[..., None] | str
"""Called as ``target(address, *args)`` in every rank; ``"module:name"`` is imported there alone."""


@dataclass(frozen=True)
class Begin:
    """Be this rank of the epoch that begins."""

    address: RankAddress
    args: tuple[Any, ...]
    report: Path
    """Where to say why, if it fails and the job with it."""
    epoch: int = 1
    """Of the job, counted from 1."""
    may_go_on: bool = False
    """The job may go on after ranks were lost. Then the target has the keyword ``abort``, and asks
    ``own_stop`` whether it is to stop."""


Order = Begin | Literal["abort", "come", "end", "ping"]
"""From the launcher: the epoch is over, come to the door; come between two steps; nothing is next;
answer."""


@dataclass(frozen=True)
class Heard:
    """This rank was told that the epoch is over, and may take a moment to come."""

    epoch: int


Word = Failure | Heard | Literal["done", "moved", "alive"]
"""To the launcher: this rank is at the door, since it lost another one or since its work is done,
or was to come; or it may take a moment to come; or it answers."""


def be_ranks(target: Target, logs: Path, pipe: Connection) -> None:
    """First code of the process: output to a log, exceptions to a report that the parent reads."""
    gc.freeze()  # what was imported before the first epoch stays: nobody needs to look through it
    control = _Control(pipe)
    terminal = os.dup(1), os.dup(2)
    lost: Failure | None = None
    while True:
        began = control.orders.get()
        if began is None and lost is not None:
            os._exit(1)  # waiting for communication threads whose peer is gone could hang
        if began is None:
            return
        begin, abort = began
        if begin.may_go_on:
            own_stop().listen()  # to end here would lose what the job has and has not saved
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)
        if begin.address.rank > 0:
            redirect(logs / f"rank{begin.address.rank}.log")
        else:
            _back_to(*terminal)
        lost = _epoch(target, begin, abort)
        if lost is not None and (not begin.may_go_on or lost.cause != "peer"):
            _give_up(lost, logs, begin.report, terminal[1])
        if not begin.may_go_on:
            return
        word = _word(lost, abort)
        del began, begin, abort
        gc.collect()  # models hold themselves in circles
        control.say(word)


def _word(lost: Failure | None, abort: Abort) -> Word:
    """How the epoch ended."""
    if lost is not None:
        return lost
    return "moved" if abort.left else "done"


def _epoch(target: Target, begin: Begin, abort: Abort) -> Failure | None:
    """Run the target; how it failed, if it did."""
    more = {"abort": abort} if begin.may_go_on else {}
    try:
        found(target)(begin.address, *begin.args, **more)
    except KeyboardInterrupt:
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - reported in full to the parent
        failure = described(begin.address.rank, error)
        # Whatever fails in an epoch that is over fails for that.
        return replace(failure, cause="peer") if abort.asked else failure
    return None


class _Control:
    """Listens to the launcher while the rank is busy."""

    def __init__(self, pipe: Connection) -> None:
        self.orders: queue.SimpleQueue[tuple[Begin, Abort] | None] = queue.SimpleQueue()
        """None: nothing is next."""
        self._pipe = pipe
        self._lock = threading.Lock()
        self._epoch, self._abort = 0, Abort()
        """The one that began last, and what ends it."""
        self.say("alive")  # from now on
        threading.Thread(target=self._listen, name="launcher", daemon=True).start()

    def say(self, word: Word) -> None:
        """To the launcher. Ends the process where that is gone."""
        try:
            with self._lock:
                self._pipe.send(word)
        except OSError:
            os._exit(1)

    def _listen(self) -> None:
        try:
            while self._obey():
                pass
        except BaseException:  # noqa: BLE001 - nobody else could say it, or hear the launcher
            traceback.print_exc()
        os._exit(1)

    def _obey(self) -> bool:
        """One order. False: the launcher is gone; nobody would read how this ended, or end it."""
        try:
            order: Order = self._pipe.recv()
        except (EOFError, OSError):
            return False
        match order:
            case "end":
                self.orders.put(None)
            case "ping":
                self.say("alive")
            case "abort":
                self.say(Heard(self._epoch))
                self._abort.ask()
            case "come":
                self._abort.wanted = True
            case begin:
                self._epoch, self._abort = begin.epoch, Abort()
                self.orders.put((begin, self._abort))
        return True


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


def found(target: Target) -> Callable[..., None]:
    """What is called."""
    return pkgutil.resolve_name(target) if isinstance(target, str) else target


def redirect(path: Path) -> None:
    """Send this process's standard output and error to a file, C libraries included."""
    with path.open("ab") as log:
        _back_to(log.fileno(), log.fileno())


def _back_to(output: int, errors: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(output, 1)
    os.dup2(errors, 2)


def _give_up(failure: Failure, logs: Path, report: Path, terminal: int) -> NoReturn:
    """End the process; what it has to say is left for a person and for the parent."""
    try:
        _leave(failure, logs, report)
    except OSError:  # such as the full disk that it failed for
        said = f"error: {failure.words}\n{failure.detail}"
        os.write(terminal, said.encode(errors="replace"))
        os._exit(UNREPORTED)
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


def described(rank: int, error: Exception) -> Failure:
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
            cause = "signal" if error.is_loss else "machine"
        case OSError() if no_room(error):
            return Failure(rank, "machine", no_room(error), when=time.time())
        case _:
            text = f"{type(error).__name__}: {error}"
            return Failure(rank, "error", text, traceback.format_exc(), time.time())
    return Failure(rank, cause, str(error), when=time.time())

"""Worker processes that talk to their parent over two pipes of their own.

No queue is shared: a worker that is slow, or dies in the middle of a message, holds up nobody
else. Only bytes cross a pipe. A worker ends by itself when its parent is gone, however it went.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkServerContext, SpawnContext
from types import ModuleType
from typing import Any

Context = SpawnContext | ForkServerContext
"""How processes start. Plain fork is refused: it copies locks that the parent's threads hold."""

_GRACE_S = 0.5


class ProcessDiedError(Exception):
    """A worker ended without saying why; the message says how it ended."""


class WorkerProcess:
    """A daemonic process running ``target(inbox, outbox, *args)``."""

    def __init__(
        self, context: Context, target: Callable[..., None], *args: object, name: str
    ) -> None:
        assert not isinstance(context, ForkContext), "workers need a spawn or forkserver context"
        child_inbox, self._outbox = context.Pipe(duplex=False)
        self.inbox, child_outbox = context.Pipe(duplex=False)
        self._process = context.Process(
            target=target, args=(child_inbox, child_outbox, *args), name=name, daemon=True
        )
        with _main_module_left_alone():
            self._process.start()
        # The pipes must have no other holder, or neither side would see that the other is gone.
        child_inbox.close()
        child_outbox.close()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    def send(self, message: bytes) -> None:
        """Send to the worker.

        Raises:
            ProcessDiedError: it is gone.
        """
        try:
            self._outbox.send_bytes(message)
        except OSError:
            raise ProcessDiedError(self._how_it_ended()) from None

    def receive(self) -> bytes:
        """The worker's next message; waits for it.

        Raises:
            ProcessDiedError: it is gone, and so is the rest of what it said.
        """
        try:
            return self.inbox.recv_bytes()
        except (EOFError, OSError):
            raise ProcessDiedError(self._how_it_ended()) from None

    def close(self) -> None:
        """Let the worker see the end of its pipes."""
        self._outbox.close()
        self.inbox.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the process to end, and after ``timeout_s`` end it."""
        self._process.join(max(timeout_s, 0))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _how_it_ended(self) -> str:
        self._process.join(_GRACE_S)
        code = self._process.exitcode
        if code is None:
            return f"process {self.pid} closed its pipe"
        if code >= 0:
            return f"process {self.pid} ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"process {self.pid} was ended by {name}{hint}"


def end_workers(workers: Iterable[WorkerProcess]) -> None:
    """Let all of them end, and end those that do not within half a second."""
    workers = list(workers)
    for worker in workers:
        worker.close()
    deadline = time.monotonic() + _GRACE_S
    for worker in workers:
        worker.join(deadline - time.monotonic())


def receive_or_end(inbox: Connection) -> bytes:
    """In a worker: the parent's next message; ends the process when the parent is gone."""
    parent = parent_process()
    assert parent is not None, "only a worker has a parent"
    ready = wait([inbox, parent.sentinel])
    if inbox not in ready:
        sys.exit()
    try:
        return inbox.recv_bytes()
    except (EOFError, OSError):
        sys.exit()


def ignore_interrupts() -> None:
    """In a worker: leave Ctrl-C, which the terminal sends to all processes, to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _main_module_left_alone() -> Iterator[None]:
    """Keep a starting process from running the user's main script once more.

    A process that is not forked imports ``__main__`` again, for functions that were defined there.
    Workers use none, and a script may import PyTorch and build a model at its top.
    """
    main: Any = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main

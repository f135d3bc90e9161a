"""Batches made ahead of time by processes of their own, in an order that does not depend on them.

Step t is made by worker t modulo their number, and the consumer asks the workers in turn: which
batch comes next is fixed, whichever worker is slow. A credit goes to a worker for each batch taken
from it, and it stays at most ``prefetch`` batches ahead. No queue is shared: every worker has its
own pair of pipes, and one that is slow, or dies in the middle of a message, holds up nobody else.
Only bytes cross a pipe. A worker ends when its parent is gone, however it went, even a worker that
is stopped: the kernel sees to that.
"""

from __future__ import annotations

import fcntl
import os
import queue
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkServerContext, SpawnContext
from types import ModuleType

import numpy as np
import numpy.typing as npt

from weft.config.errors import RunError
from weft.data.batch import Batch, Dataset, DatasetSpec

Context = SpawnContext | ForkServerContext
"""How processes start. Plain fork is refused: it copies locks that the parent's threads hold."""

_HEADER = struct.Struct("<?q")
"""(is an error, step) before every message of a worker."""
_GRACE_S = 0.5


class LoaderError(RunError):
    """A loader process failed. Names the worker and the step whose batch it owed."""

    def __init__(self, worker: int, step: int, detail: str, *, is_loss: bool = False) -> None:
        super().__init__(f"loader worker {worker}, at the batch of step {step}: {detail}")
        self.worker = worker
        self.step = step
        self.is_loss = is_loss
        self.detail = detail
        """What a person needs to know, the worker's traceback, or how it ended."""


def _positions(
    global_batch: int, offsets: npt.NDArray[np.int64], step: int
) -> npt.NDArray[np.int64]:
    """The sample positions ``[n]`` of a step, in the order this rank wants them."""
    return step * global_batch + offsets


class Loader(AbstractContextManager["Loader"]):
    """Iterates over the batches of one rank. A context manager; ``close`` ends its processes.

    Raises, while iterating:
        LoaderError: a worker failed, or is gone; within a second, never a wait without end.
    """

    def __init__(
        self,
        spec: DatasetSpec,
        *,
        global_batch: int,
        offsets: Sequence[int],
        context: Context,
        first_step: int = 0,
        last_step: int | None = None,
        workers: int = 1,
        prefetch: int = 4,
    ) -> None:
        """
        Args:
            spec: How to open the dataset, here or in a worker.
            global_batch: Samples of all ranks in one step.
            offsets: This rank's positions inside each global batch.
            context: How worker processes start.
            first_step: Step of the first batch.
            last_step: The step after the last batch; None: no end.
            workers: Processes; 0 makes every batch here, when it is asked for.
            prefetch: Batches that each worker makes ahead, at least 1.
        """
        assert workers >= 0 and prefetch >= 1, f"workers {workers}, prefetch {prefetch}"
        assert not isinstance(context, ForkContext), "workers need a spawn or forkserver context"
        self._global_batch = global_batch
        self._end = sys.maxsize if last_step is None else last_step
        self._dataset: Dataset | None = None
        self._start = partial(_Worker, context), workers, prefetch
        self._workers: list[_Worker] = []
        self.follow(offsets, first_step, spec)

    def follow(self, offsets: Sequence[int], step: int, spec: DatasetSpec) -> None:
        """From this step on give the batches at other positions inside each global one, of this
        dataset."""
        self.close()
        self._positions = partial(_positions, self._global_batch, np.array(offsets, np.int64))
        self._step = self._first_step = step
        self.spec = spec
        make, workers, prefetch = self._start
        if not workers:
            self._dataset = spec.open()
        try:
            for number in range(workers):
                own = range(step + number, self._end, workers)
                self._workers.append(make(number, spec, self._positions, own, prefetch))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.process.pid or 0 for worker in self._workers]

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._step >= self._end:
            raise StopIteration
        if self._dataset is not None:
            batch = self._dataset.batch(self._positions(self._step))
        else:
            batch = self._take(self._step)
        self._step += 1
        return batch

    def _take(self, step: int) -> Batch:
        assert self._workers, "the loader is closed"
        number = (step - self._first_step) % len(self._workers)
        worker = self._workers[number]
        try:
            data = worker.inbox.recv_bytes()
        except (EOFError, OSError):
            how = worker.how_it_ended()
            raise LoaderError(number, step, how, is_loss=worker.was_killed) from None
        with suppress(OSError):  # What it made before it died is still good.
            worker.outbox.send_bytes(b"")
        failed, made = _HEADER.unpack_from(data)
        if failed:
            raise LoaderError(number, step, data[_HEADER.size :].decode())
        assert made == step, f"worker {number} made step {made}, not {step}"
        return Batch.from_bytes(data[_HEADER.size :])

    def close(self) -> None:
        """Let the worker processes end, and end those that do not within half a second. May be
        called again."""
        for worker in self._workers:
            worker.outbox.close()
            worker.inbox.close()
        deadline = time.monotonic() + _GRACE_S
        for worker in self._workers:
            worker.process.join(max(deadline - time.monotonic(), 0))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join(_GRACE_S)
        self._workers.clear()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """A daemonic process that makes batches, and the pipes to and from it."""

    def __init__(self, context: Context, number: int, *work: object) -> None:
        child_inbox, self.outbox = context.Pipe(duplex=False)
        self.inbox, child_outbox = context.Pipe(duplex=False)
        args = (child_inbox, child_outbox, *work)
        self.process = context.Process(target=_work, args=args, name=f"loader{number}", daemon=True)
        # A process that is not forked imports ``__main__`` again, for functions that were defined
        # there. Workers use none, and a script may import PyTorch and build a model at its top.
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            self.process.start()
        finally:
            sys.modules["__main__"] = main
        # The pipes must have no other holder, or neither side would see that the other is gone.
        child_inbox.close()
        child_outbox.close()

    @property
    def was_killed(self) -> bool:
        return (self.process.exitcode or 0) < 0

    def how_it_ended(self) -> str:
        self.process.join(_GRACE_S)
        code, name = self.process.exitcode, f"process {self.process.pid}"
        if code is None:
            return f"{name} closed its pipe"
        if code >= 0:
            return f"{name} ended with exit code {code}"
        killer = signal.Signals(-code).name
        hint = " (out of memory?)" if killer == "SIGKILL" else ""
        return f"{name} was ended by {killer}{hint}"


def _work(
    inbox: Connection,
    outbox: Connection,
    spec: DatasetSpec,
    positions: Callable[[int], npt.NDArray[np.int64]],
    own: range,
    prefetch: int,
) -> None:
    """A worker process: makes its batches until its credit, or its parent, is gone.

    A thread of its own sends, so that batches are made ahead although a pipe holds little.
    """
    # They may go to all processes of a group or a job; they are for the parent.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _be_killed_with_parent()
    outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_send_all, args=(outbox, outgoing), daemon=True).start()
    step = own.start
    try:
        dataset = spec.open()
        credit = prefetch
        for step in own:
            while credit == 0 or inbox.poll():
                _receive_or_end(inbox)
                credit += 1
            batch = dataset.batch(positions(step))
            outgoing.put(_HEADER.pack(False, step) + batch.to_bytes())
            credit -= 1
    except RunError as error:
        outgoing.put(_HEADER.pack(True, step) + str(error).encode())
    except Exception:  # noqa: BLE001 - reported in full to the parent
        outgoing.put(_HEADER.pack(True, step) + traceback.format_exc().encode())
    while True:  # Until the parent closes the pipe: what was made must be there to be taken.
        _receive_or_end(inbox)


def _be_killed_with_parent() -> None:
    """Have the kernel kill this process when its parent is gone.

    A process that is stopped would not see it, and hold the terminal, or a pipe, of the command.
    The parent alone has the other end of the sentinel, and writes nothing to it: the one event that
    is left is its end.
    """
    parent = parent_process()
    assert parent is not None, "only a worker has a parent"
    sentinel = parent.sentinel
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if wait([sentinel], 0):
        sys.exit()  # it went before the kernel was told


def _receive_or_end(inbox: Connection) -> None:
    """Wait for the parent's next message; end the process when the parent is gone."""
    parent = parent_process()
    assert parent is not None, "only a worker has a parent"
    if inbox not in wait([inbox, parent.sentinel]):
        sys.exit()
    try:
        inbox.recv_bytes()
    except (EOFError, OSError):
        sys.exit()


def _send_all(outbox: Connection, outgoing: queue.SimpleQueue[bytes]) -> None:
    while True:
        try:
            outbox.send_bytes(outgoing.get())
        except OSError:
            return  # The parent is gone; the main thread sees that too.

"""Batches made ahead of time by processes of their own, in an order that does not depend on them.

Step t is made by worker t modulo their number, and the consumer asks the workers in turn: which
batch comes next is fixed, whichever worker is slow. Every worker has its own pair of pipes. A
credit goes to a worker for each batch taken from it, and it stays at most ``prefetch``
batches ahead.
"""

from __future__ import annotations

import queue
import struct
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType

import numpy as np
import numpy.typing as npt

from weft.config.errors import RunError
from weft.data.batch import Batch, Dataset, DatasetSpec
from weft.data.processes import (
    Context,
    ProcessDiedError,
    WorkerProcess,
    end_workers,
    ignore_interrupts,
    receive_or_end,
)

_HEADER = struct.Struct("<?q")
"""(is an error, step) before every message of a worker."""


class LoaderError(RunError):
    """A loader process failed. Names the worker and the step whose batch it owed."""

    def __init__(self, worker: int, step: int, detail: str) -> None:
        super().__init__(f"loader worker {worker}, at the batch of step {step}: {detail}")
        self.worker = worker
        self.step = step
        self.detail = detail
        """The worker's traceback, or how it ended."""


@dataclass(frozen=True)
class Steps:
    """Which sample positions one rank reads at every step."""

    global_batch: int
    """Samples of all ranks in one step."""
    offsets: tuple[int, ...]
    """This rank's positions inside the global batch, in the order it wants them."""

    def positions(self, step: int) -> npt.NDArray[np.int64]:
        """The positions ``[len(offsets)]`` of a step."""
        return step * self.global_batch + np.asarray(self.offsets, dtype=np.int64)


class Loader:
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
        self._steps = Steps(global_batch, tuple(int(offset) for offset in offsets))
        self._step = first_step
        self._last_step = last_step
        self._dataset: Dataset | None = None if workers else spec.open()
        self._workers: list[WorkerProcess] = []
        try:
            for number in range(workers):
                first = first_step + number
                plan = WorkerPlan(self._steps, first, last_step, workers, prefetch)
                worker = WorkerProcess(context, work, spec, plan, name=f"loader{number}")
                self._workers.append(worker)
        except BaseException:
            self.close()
            raise
        self._first_step = first_step

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.pid for worker in self._workers]

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._last_step is not None and self._step >= self._last_step:
            raise StopIteration
        step = self._step
        if self._dataset is not None:
            batch = self._dataset.batch(self._steps.positions(step))
        else:
            batch = self._take(step)
        self._step += 1
        return batch

    def _take(self, step: int) -> Batch:
        assert self._workers, "the loader is closed"
        number = (step - self._first_step) % len(self._workers)
        worker = self._workers[number]
        try:
            data = worker.receive()
        except ProcessDiedError as error:
            raise LoaderError(number, step, str(error)) from None
        with suppress(ProcessDiedError):  # What it made before it died is still good.
            worker.send(b"")
        failed, made = _HEADER.unpack_from(data)
        if failed:
            raise LoaderError(number, step, data[_HEADER.size :].decode())
        assert made == step, f"worker {number} made step {made}, not {step}"
        return Batch.from_bytes(data[_HEADER.size :])

    def close(self) -> None:
        """End the worker processes. May be called again."""
        end_workers(self._workers)
        self._workers.clear()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True)
class WorkerPlan:
    """Which batches one worker makes."""

    steps: Steps
    first_step: int
    last_step: int | None
    stride: int
    prefetch: int


def work(inbox: Connection, outbox: Connection, spec: DatasetSpec, plan: WorkerPlan) -> None:
    """A worker process: makes its batches until its credit, or its parent, is gone.

    A thread of its own sends, so that batches are made ahead although a pipe holds little.
    """
    ignore_interrupts()
    outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    sender = threading.Thread(target=_send_all, args=(outbox, outgoing), daemon=True)
    sender.start()
    step = plan.first_step
    try:
        dataset = spec.open()
        credit = plan.prefetch
        while plan.last_step is None or step < plan.last_step:
            while credit == 0 or inbox.poll():
                receive_or_end(inbox)
                credit += 1
            batch = dataset.batch(plan.steps.positions(step))
            outgoing.put(_HEADER.pack(False, step) + batch.to_bytes())
            credit -= 1
            step += plan.stride
    except Exception:  # noqa: BLE001 - reported in full to the parent
        outgoing.put(_HEADER.pack(True, step) + traceback.format_exc().encode())
    while True:  # Until the parent closes the pipe: what was made must be there to be taken.
        receive_or_end(inbox)


def _send_all(outbox: Connection, outgoing: queue.SimpleQueue[bytes]) -> None:
    while True:
        try:
            outbox.send_bytes(outgoing.get())
        except OSError:
            return  # The parent is gone; the main thread sees that too.

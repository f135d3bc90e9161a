"""Shares encoding jobs out among worker processes, and collects the results in order."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from weft.config.errors import ConfigError
from weft.data.cache import PrepareError
from weft.data.encode import (
    Encoded,
    Encoding,
    Job,
    encode_job,
    encoded_from_json,
    job_to_json,
    work,
)
from weft.data.processes import Context, ProcessDiedError, WorkerProcess, end_workers
from weft.data.tokenizer import load_tokenizer


def run_jobs(
    encoding: Encoding,
    jobs: Sequence[Job],
    processes: int,
    context: Context | None,
    tell: Callable[[int], None],
) -> list[Encoded]:
    """Do all jobs, in this process when ``processes`` is 0; the results are in their order.

    ``tell`` gets the bytes of text as they are done.

    Raises:
        ConfigError: a document or the tokenizer cannot be used.
        PrepareError: a worker process died, or failed by our mistake.
    """
    if processes == 0:
        tokenizer = load_tokenizer(Path(encoding.tokenizer_file))
        return [encode_job(encoding, job, tokenizer, tell) for job in jobs]
    context = context or multiprocessing.get_context("spawn")
    workers: list[WorkerProcess] = []
    try:
        while len(workers) < processes:
            name = f"tokenize{len(workers)}"
            workers.append(WorkerProcess(context, work, encoding, name=name))
        return _Sharing(encoding, jobs, workers, tell).run()
    finally:
        end_workers(workers)


class _Sharing:
    """The jobs that wait, are under way and are done."""

    def __init__(
        self,
        encoding: Encoding,
        jobs: Sequence[Job],
        workers: Sequence[WorkerProcess],
        tell: Callable[[int], None],
    ) -> None:
        self._encoding = encoding
        self._waiting = list(reversed(jobs))
        self._workers = workers
        self._tell = tell
        self._doing: dict[WorkerProcess, Job] = {}
        self._done: dict[int, Encoded] = {}

    def run(self) -> list[Encoded]:
        for worker in self._workers:
            self._hand_out(worker)
        while self._doing:
            inboxes = {worker.inbox: worker for worker in self._doing}
            for inbox in wait(list(inboxes)):
                self._hear(next(w for i, w in inboxes.items() if i is inbox))
        return [self._done[number] for number in sorted(self._done)]

    def _hand_out(self, worker: WorkerProcess) -> None:
        if not self._waiting:
            return
        self._doing[worker] = self._waiting.pop()
        try:
            worker.send(job_to_json(self._doing[worker]))
        except ProcessDiedError as error:
            raise self._died(worker, error) from None

    def _hear(self, worker: WorkerProcess) -> None:
        try:
            message: dict[str, Any] = json.loads(worker.receive())
        except ProcessDiedError as error:
            raise self._died(worker, error) from None
        if "bytes" in message:
            self._tell(message["bytes"])
        elif "config_error" in message:
            raise ConfigError(*message["config_error"])
        elif "error" in message:
            raise PrepareError(f"tokenizing failed:\n{message['error']}")
        else:
            encoded = encoded_from_json(message["done"])
            self._done[encoded.number] = encoded
            del self._doing[worker]
            self._hand_out(worker)

    def _died(self, worker: WorkerProcess, error: ProcessDiedError) -> PrepareError:
        """Which files the worker was at: one of them may be why."""
        job = self._doing[worker]
        files = self._encoding.sources[job.source].files
        names = [files[part.file].name for part in (job.parts[0], job.parts[-1])]
        return PrepareError(
            f"a worker that tokenized {names[0]} to {names[1]} is gone: {error}. "
            "Nothing was kept; the same command tries again."
        )

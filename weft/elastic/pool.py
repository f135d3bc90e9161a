"""A pool of ranks that stay up between jobs: rehearsals, ``weft verify`` and the tests use it.

A job takes some of the processes, gives them a meeting point of their own, and returns each
rank's result. Processes that failed or hung are replaced before the next job.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from weft.comm.address import RankAddress
from weft.elastic.failure import Failure, RanksFailedError
from weft.elastic.processes import warm_context
from weft.elastic.rank_process import described, end_with_parent

Job = Callable[..., Any]
"""Called as ``job(address, *args)``; its result must be plain data or arrays."""


ANSWER_S = 1200.0
"""How long a job may take: longer than a collective of it, which says what it waited for."""


class WorkerPool:
    """Processes that run one job after another. Close it, or use it as a context manager."""

    def __init__(self) -> None:
        self._context = warm_context()
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, job: Job, *args: Any, world_size: int, timeout_s: float = ANSWER_S) -> list[Any]:
        """Results of ``job(address, *args)`` on ``world_size`` ranks, in rank order.

        Raises:
            RanksFailedError: a rank raised, died or did not answer within ``timeout_s``.
        """
        while len(self._workers) < world_size:
            self._workers.append(self._start())
        workers = self._workers[:world_size]
        with tempfile.TemporaryDirectory(prefix="weft-pool-") as folder:
            for rank, (_, pipe) in enumerate(workers):
                address = RankAddress(
                    rank=rank,
                    world_size=world_size,
                    local_rank=rank,
                    store_file=Path(folder) / "meet",
                )
                pipe.send((job, address, args))
            answers = self._collect(world_size, time.monotonic() + timeout_s)
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        if failures:
            self._replace(world_size)
            raise RanksFailedError(failures)
        return answers

    def close(self) -> None:
        """End every process of the pool."""
        self._replace(len(self._workers))

    def _start(self) -> tuple[BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(theirs,), name="weft-pool", daemon=True
        )
        process.start()
        theirs.close()
        return process, ours

    def _collect(self, world_size: int, deadline: float) -> list[Any]:
        """Answers in rank order; the first failure shortens the wait for the rest."""
        answers: dict[int, Any] = {}
        waiting = {self._workers[rank][1]: rank for rank in range(world_size)}
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), max(0.0, deadline - time.monotonic())):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                answers[rank] = _receive(rank, pipe)
                if isinstance(answers[rank], Failure):
                    deadline = min(deadline, time.monotonic() + 5.0)
        late = Failure(-1, "peer", "did not answer in time and had to be ended")
        return [answers.get(rank, late) for rank in range(world_size)]

    def _replace(self, count: int) -> None:
        for process, pipe in self._workers[:count]:
            pipe.close()
            process.kill()
            process.join()
        del self._workers[:count]


def _receive(rank: int, pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return Failure(rank, "signal", "the process died")


def _serve(pipe: Connection) -> None:
    """A pool process: run jobs until the pool goes away."""
    import torch

    end_with_parent()
    torch.set_num_threads(1)
    while True:
        gc.freeze()  # what was imported, or is left of a job, stays: no need to look again
        try:
            job, address, args = pipe.recv()
        except EOFError:
            os._exit(0)
        answer = _answer(job, address, args)
        del job, args
        gc.collect()  # models and stores hold themselves in circles; a store needs its file to end
        pipe.send(answer)
        del answer


def _answer(job: Job, address: RankAddress, args: tuple[Any, ...]) -> Any:
    try:
        return job(address, *args)
    except Exception as error:  # noqa: BLE001 - reported to the parent
        return described(address.rank, error)

"""The parity table on the strict backend: one plan, one seed, one number of hardware queues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from parity.cases import EVERY, Case
from strict.group import on_processors
from strict.rules import Rules
from strict.server import Server

from weft.comm.address import RankAddress
from weft.diagnose.verify import Difference, Rehearsal, Trace, difference, one_process, rehearse
from weft.elastic.pool import WorkerPool
from weft.plan.plan import Plan

QUEUES = (1, 2, 4, 8)
CASES = {case.name: case for case in EVERY if case.plan().world_size > 1}
On = Callable[..., Any]
"""``on(address, where, job, *args)``: the job with ranks that talk through the strict server."""


def alone(address: RankAddress, job: Callable[..., Any], *args: Any) -> Any:
    """A job of one process needs no library."""
    return job(address, *args)


class Strict:
    """Runs plans on a pool of processes and compares them with one process."""

    def __init__(
        self,
        pool: WorkerPool,
        on: On = on_processors,
        *,
        alone: Callable[..., Any] = alone,
        device: str = "cpu",
        beside: Callable[[Plan], Plan] = lambda plan: plan,
    ) -> None:
        """``on``, ``alone``: how ranks on devices of that family join, and one process does;
        ``beside``: puts some ranks on other devices, which do not talk through the server."""
        self._pool, self._on, self._on_alone, self._device = pool, on, alone, device
        self._beside = beside
        self._alone: dict[tuple[Rehearsal, int, str], Trace] = {}

    def difference(self, case: Case, *, queues: int, seed: int) -> Difference:
        """From the same steps in one process.

        Raises:
            RanksFailedError: what the strict backend found.
        """
        rehearsal, plan = case.rehearsal(), case.plan()
        key = (rehearsal, plan.global_batch, case.precision)
        if key not in self._alone:
            self._alone[key] = rehearse(self._run_alone, one_process(plan), rehearsal)
        with Server(Rules(queues, seed)) as server:

            def run(job: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
                where = server.where
                return self._pool.run(self._on, where, job, *args, world_size=world_size)

            there = plan.each(lambda stage: replace(stage, device=self._device))
            there = self._beside(there)
            found = rehearse(run, there, replace(rehearsal, by_work=case.by_work))
        assert server.rules.num_calls, "nobody asked the strict server"
        return difference(self._alone[key], found)

    def _run_alone(self, job: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
        return self._pool.run(self._on_alone, job, *args, world_size=world_size)

"""A rank that is lost in any phase of its life is replaced, and training computes the same."""

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from train.small_jobs import SMALL, STEPS, job, losses
from train.test_life import live

from weft.comm.abort import Abort
from weft.comm.address import RankAddress
from weft.elastic.failure import Epoch, Failure
from weft.elastic.pool import WorkerPool
from weft.elastic.processes import run_ranks
from weft.elastic.recovery import Restarts
from weft.report.events import EVENTS_FILE, read_events
from weft.report.goodput import goodput
from weft.report.metrics import read_metrics
from weft.train.history import Rewind, note_rewinds
from weft.train.job import Job
from weft.train.saver import Saver
from weft.train.worker import RankLife, main

ASKED = [
    *[*SMALL, "plan.shares=[2,2]", "checkpoint.every=1", "train.eval_every=0"],
]
FAULTS = [
    *[("join", 1), ("join", 0), ("agree", 0), ("build", 1), ("restore", 0), ("run", 1)],
    *[("save", 0), ("save", 1), ("leave", 1)],
]
"""Moment and rank, one for each epoch but the last: some come while the job still recovers."""


@contextmanager
def faults(fault: tuple[str, int], rank: int) -> Iterator[None]:
    """This process ends at that moment if it is that rank."""

    def at(moment: str) -> None:
        if (moment, rank) == fault:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(method: Callable[..., None], moment: Callable[..., str]) -> Callable[..., None]:
        def wrapped(*args: Any, **more: Any) -> None:
            method(*args, **more)
            at(moment(*args))

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankLife, "_enter", after(RankLife._enter, lambda _, phase: str(phase)))
        patch.setattr(Saver, "save", after(Saver.save, lambda *_: "save"))
        yield


def trains(
    address: RankAddress,
    one: Job,
    fault: tuple[str, int],
    pids: Path,
    *,
    abort: Abort | None = None,
) -> None:
    with (pids / str(address.rank)).open("a") as file:
        file.write(f"{os.getpid()}\n")
    with faults(fault, address.rank):
        main(address, one, abort=abort)


def test_a_rank_may_be_lost_in_any_phase(
    tmp_path: Path, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.elastic.crew.GRACE_S", 600.0)  # however busy the machine is
    whole, parts, pids = (tmp_path / name for name in ("whole", "parts", "pids"))
    pids.mkdir()
    pool.run(live, [job(ASKED, whole, STEPS)], world_size=2)
    asked = [*ASKED, f"recovery.restarts={len(FAULTS)}"]
    one, left = job(asked, parts, STEPS), [*FAULTS, ("never", 0)]
    restarts = Restarts(one, lambda _: None)
    told: list[list[tuple[int, str]]] = []

    def recover(failures: Sequence[Failure]) -> Epoch:
        told.append([(f.rank, f.phase) for f in failures if f.cause == "signal"])
        assert restarts(failures) is not None
        return Epoch((one, left.pop(0), pids), 2)

    run_ranks(trains, (one, left.pop(0), pids), 2, folder=parts, recover=recover)
    phases = [(rank, "run" if moment == "save" else moment) for moment, rank in FAULTS]
    assert told == [[fault] for fault in phases]
    assert losses(parts) == losses(whole)
    assert not list(parts.glob(".*"))
    events = read_events(parts / EVENTS_FILE)
    lost = [(e.rank, e.facts["phase"]) for e in events if e.kind == "epoch_end"]
    assert lost == phases
    assert sum(e.kind == "restart" for e in events) == len(FAULTS)
    assert {"memory"} <= {e.facts["source"] for e in events if e.kind == "restore"}
    assert events[-1].kind == "end"
    found = goodput(events, read_metrics(parts / "metrics.jsonl")[0])
    assert found is not None
    assert found.useful_s > 0 < found.between_s
    assert found.away_s == 0, "all was one command"
    for rank in range(2):
        seen = (pids / str(rank)).read_text().split()
        assert len(seen) == len(FAULTS) + 1
        changed = [a != b for a, b in itertools.pairwise(seen)]
        assert changed == [victim == rank for _, victim in FAULTS], "survivors keep their process"


def test_restarts_without_a_new_step_between_them_are_counted(tmp_path: Path) -> None:
    said: list[str] = []
    recover = Restarts(job(["recovery.restarts=2", *ASKED], tmp_path, STEPS), said.append)
    lost = [Failure(1, "signal", "was ended by SIGKILL from outside", phase="run")]
    file = tmp_path / "metrics.jsonl"

    def reach(step: int) -> None:
        file.write_text(f'{{"step": {step}, "loss": 1.0}}\n')

    assert recover(lost) is not None
    reach(3)
    assert [recover(lost) is None for _ in range(2)] == [False, False]
    reach(2)
    assert recover(lost) is None, "it did not come further than before"
    reach(4)
    assert recover(lost) is not None
    rank = "rank 1: was ended by SIGKILL from outside in phase run"
    assert said == [
        f"{rank}, after step 0: restart 1 of 2 begins",
        f"{rank}, after step 3: restart 1 of 2 begins",
        f"{rank}, after step 3: restart 2 of 2 begins",
        f"{rank}, after step 4: restart 1 of 2 begins",
    ]


def test_steps_after_a_rewind_are_new(tmp_path: Path) -> None:
    recover = Restarts(job(["recovery.restarts=1", *ASKED], tmp_path, STEPS), lambda _: None)
    lost = [Failure(1, "signal", "was ended by SIGKILL from outside", phase="run")]

    def reach(step: int) -> None:
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": {step}, "loss": 1.0}}\n')

    reach(95)
    assert recover(lost) is not None
    note_rewinds(tmp_path, [Rewind(95)])
    for step in (60, 70):
        reach(step)
        assert recover(lost) is not None, step
    assert recover(lost) is None

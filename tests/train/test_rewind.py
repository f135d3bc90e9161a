"""A run goes back and leaves out what led to a spike, and computes the same however often it is
killed on the way."""

import json
import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from train.small_jobs import SMALL, job
from train.test_life import live

from weft.comm.abort import Abort
from weft.comm.address import RankAddress
from weft.data.batch import Batch
from weft.elastic.failure import Epoch, Failure
from weft.elastic.pool import WorkerPool
from weft.elastic.processes import run_ranks
from weft.elastic.recovery import Restarts
from weft.report.events import EVENTS_FILE, read_events
from weft.report.goodput import goodput, spans
from weft.report.metrics import read_metrics
from weft.train import watch
from weft.train.engine import Engine, StepResult
from weft.train.job import Job
from weft.train.loop import Run
from weft.train.run_folder import REWINDS_FILE
from weft.train.worker import main

STEPS, BATCH = 12, 4
ASKED = [
    *[*SMALL, "plan.shares=[2,2]", "checkpoint.every=2", "train.eval_every=0", "train.steps=20"],
    *["recovery.when_spike=rewind", "recovery.when_not_finite=rewind"],
    *["recovery.spike_window=4", "recovery.spike_limit=50"],
    "checkpoint.asynchronous=false",  # what was saved does not depend on how fast the disk is
]
BAD = {7: 5.0, 12: math.nan}
"""What the loss of a batch is multiplied by. When 7 is met, the state after 6 steps was saved, and
when 12 is met as the eleventh, that after 10."""
READ = [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 13, 14]
"""The batches of the steps that count."""


@contextmanager
def bad_batches(rank: int, fault: str) -> Iterator[None]:
    """In this process; if it is that of the fault, it is killed there."""
    batches, step = Run.microbatches, Engine.step
    here = [0]

    def cut(run: Run, batch: Batch, number: int) -> Any:
        here[0] = int(batch.samples[0]) // BATCH
        if fault == "on the way" and rank == 1 and here[0] == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return batches(run, batch, number)

    def worse(engine: Engine, *given: Any, **settings: Any) -> StepResult:
        result = step(engine, *given, **settings)
        return replace(result, loss=result.loss * BAD.get(here[0], 1.0))

    def note(*given: Any) -> None:
        noted(*given)
        if fault == "noted":
            os.kill(os.getpid(), signal.SIGKILL)

    noted = watch.note_rewinds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "microbatches", cut)
        patch.setattr(Engine, "step", worse)
        patch.setattr(watch, "note_rewinds", note)
        yield


def trains(address: RankAddress, one: Job, fault: str, *, abort: Abort | None = None) -> int:
    with bad_batches(address.rank, fault):
        main(address, one, abort=abort)
    return os.getpid()


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_the_batches_that_led_to_a_spike_are_left_out_for_good(
    tmp_path: Path, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.elastic.crew.GRACE_S", 600.0)  # however busy the machine is
    whole, parts, plain = (tmp_path / name for name in ("whole", "parts", "plain"))
    pool.run(live, [job(ASKED, plain, 15)], world_size=2)
    pool.run(trains, job(ASKED, whole, STEPS), "never", world_size=2)

    one, left = job(ASKED, parts, STEPS), ["on the way", "never"]
    restarts = Restarts(one, lambda _: None)

    def recover(failures: Sequence[Failure]) -> Epoch:
        assert restarts(failures) is not None
        return Epoch((one, left.pop(0)), 2)

    run_ranks(trains, (one, "noted"), 2, folder=parts, recover=recover)

    read, found, again = rows(plain), rows(whole), rows(parts)
    steps = [row for row in found if "loss" in row]
    assert [row["data"] for row in steps] == [read[batch]["data"] for batch in READ]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in steps[:6]] == [row["loss"] for row in read[:6]]
    same = ("step", "loss", "grad_norm", "data", "lr", "samples")
    assert [[row.get(name) for name in same] for row in again] == [
        [row.get(name) for name in same] for row in found
    ], "bit for bit, though killed twice"
    for out in (whole, parts):
        assert json.loads((out / REWINDS_FILE).read_text()) == [[6, 7], [12, 12]]
        (last,) = (out / "checkpoints").glob(f"step-*{STEPS}/index.json")
        history = json.loads(last.read_text())["state"]["history"]
        assert (history["left_out"], history["rewinds"]) == ([[6, 7], [12, 12]], [7, 12])
        events = read_events(out / EVENTS_FILE)
        told = [(e.kind, e.step) for e in events if e.kind in ("spike", "rewind")]
        assert told[-1] == ("rewind", 11)
        assert {("spike", 8), ("rewind", 8)} & {*told}
    events = read_events(whole / EVENTS_FILE)
    assert [e.step for e in events if e.kind == "start"] == [0, 6, 10]
    done, _ = read_metrics(whole / "metrics.jsonl")
    assert [span.is_restart for span in spans(events, done)] == [False, True, True]
    spent = goodput(events, done)
    assert spent is not None
    assert spent.away_s == 0 < spent.lost_s

"""The first rank's clock has a run saved, on every rank after the same step."""

from __future__ import annotations

from io import StringIO
from itertools import count
from pathlib import Path

import pytest
import torch
from train.test_saving import CONFIG, SPEC, plan_of

from weft.checkpoint.remote.owner import Owner
from weft.comm.address import RankAddress
from weft.comm.join import join
from weft.config.sections import CheckpointConfig, TrainConfig
from weft.data.synthetic import SyntheticDataset
from weft.elastic.pool import WorkerPool
from weft.nn.stage import MicroBatch
from weft.platform.cpu import CpuPlatform
from weft.report.progress import Progress
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.loop import Run, train
from weft.train.running import save_now_and_then
from weft.train.save_clock import SaveClock
from weft.train.saver import Saver

STEPS = 12


class Waiting(Run):
    """As if its numbers lay in a device's memory."""

    @property
    def waits_for_reads(self) -> bool:
        return True


class Noting(Saver):
    """Writes nothing but down which steps it was to save."""

    def __init__(self, run: Run) -> None:
        super().__init__(
            run, Path("unused"), Path("unused"), owner=Owner(), fingerprint="same", tell=print
        )
        self.steps: list[int] = []

    def save(self, step: int, *, finite: bool) -> None:
        assert finite
        self.steps.append(step)

    save_last = save


def saved_steps(
    address: RankAddress, checkpoint: CheckpointConfig, kind: type[Run], stop_at: int = 0
) -> list[int]:
    """Of steps that take a minute by the clock of rank 0, and an hour by that of others."""
    now = 0.0
    config = CONFIG.model_copy(
        update={"train": TrainConfig(steps=STEPS, log_every=4), "checkpoint": checkpoint}
    )
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)
    plan = plan_of(4, 2)
    built = assemble_model(plan, SPEC, comm, optim=config.optim, seq_len=16)
    fill(built.gradients, initial(1))
    data = SyntheticDataset(vocab_size=SPEC.vocab_size, seq_len=16, seed=3)
    mine = [i for part in plan.rank_plan(address.rank).microbatches() for i in part]

    def batch(step: int) -> list[int]:
        nonlocal now
        now += 3600.0 if address.rank else 60.0
        return [6 * step + i for i in mine]

    passes, steps = built.engine.passes, count(1)

    def asked_meanwhile(microbatches: list[MicroBatch]) -> torch.Tensor:
        sums = passes(microbatches)
        run.stop.asked = next(steps) == stop_at
        return sums

    built.engine.passes = asked_meanwhile

    with (
        pytest.MonkeyPatch.context() as patch,
        Progress(STEPS, log_every=1, mode="quiet", stream=StringIO()) as progress,
    ):
        patch.setattr("weft.train.save_clock.monotonic", lambda: now)
        run = kind(
            config=config,
            plan=plan,
            spec=SPEC,
            comm=comm,
            platform=CpuPlatform(),
            built=built,
            batches=(data.batch(batch(step)) for step in range(STEPS)),
            first_step=0,
            last_step=STEPS,
            save_clock=SaveClock(config.checkpoint.minutes),
        )
        saver = Noting(run)
        train(run, [save_now_and_then(run, saver, progress)])
    comm.close()
    return saver.steps


@pytest.mark.parametrize(
    ("checkpoint", "kind", "expected"),
    [
        (CheckpointConfig(minutes=0), Run, [12]),
        (CheckpointConfig(), Run, [5, 10, 12]),
        (CheckpointConfig(minutes=2.5), Run, [3, 6, 9, 12]),
        (CheckpointConfig(minutes=5, every=4), Run, [4, 8, 12]),
        (CheckpointConfig(minutes=3, every=5), Run, [3, 5, 8, 10, 12]),
        (CheckpointConfig(minutes=2), Waiting, [4, 8, 12]),
    ],
    ids=["never", "default", "minutes", "rarer-than-every", "both", "on-a-device"],
)
def test_ranks_save_by_one_clock(
    pool: WorkerPool, checkpoint: CheckpointConfig, kind: type[Run], expected: list[int]
) -> None:
    """A save for any reason starts it anew; where reading waits, steps that are logged count."""
    assert pool.run(saved_steps, checkpoint, kind, world_size=2) == [expected] * 2


def test_a_stop_beside_it_stops(pool: WorkerPool) -> None:
    """Every rank asks to stop, while a step computes, and one to save, in the same number."""
    checkpoint = CheckpointConfig(minutes=5)
    assert pool.run(saved_steps, checkpoint, Run, 5, world_size=2) == [[5]] * 2
    assert pool.run(saved_steps, checkpoint, Run, 6, world_size=2) == [[5, 6]] * 2

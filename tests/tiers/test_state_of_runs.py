"""Runs with optimizer state on disk: they go on from any checkpoint, whatever happens to them."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from train.small_jobs import CHANGED_AT, SMALL, STEPS, job, losses
from train.test_life import live

from weft.checkpoint.reader import open_checkpoint
from weft.comm.address import RankAddress
from weft.elastic.failure import RanksFailedError
from weft.elastic.pool import WorkerPool
from weft.optim.pieces import PieceByPiece
from weft.optim.rule import Update
from weft.train.job import Job

ASKED = [
    *[*SMALL, "plan.stages=[{dp: 2, zero: 2}]", "batch.micro=2", "compute.precision=bf16"],
    *["checkpoint.every=1", "train.eval_every=0"],
]


def bits(out: Path) -> dict[str, list[float]]:
    """All that the last checkpoint holds."""
    checkpoint = open_checkpoint(out)
    return {
        f"{kind}/{name}": checkpoint.read(name, kind).flatten().tolist()
        for kind in ("param", "exp_avg", "exp_avg_sq")
        for name in checkpoint.names(kind)
    }


def dies(address: RankAddress, one: Job) -> None:
    """Rank 1 is killed in the middle of its third update, when a piece was written back."""
    pieces, updates = PieceByPiece.parts_of, []

    def ends(self: PieceByPiece, update: Update) -> Iterator[Update]:
        updates.append(update)
        for part in pieces(self, update):
            yield part
            if len(updates) == 3 and address.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PieceByPiece, "parts_of", ends)
        live(address, [one])


def test_a_run_goes_on_wherever_its_state_was(tmp_path: Path, pool: WorkerPool) -> None:
    files = tmp_path / "files"
    files.mkdir()
    disk = [*ASKED, "optim.state_tier=disk", f"optim.state_folder={files}"]
    whole = tmp_path / "whole"
    pool.run(live, [job(ASKED, whole, STEPS)], world_size=2)
    for number, (first, then) in enumerate(((ASKED, disk), (disk, ASKED))):
        out = tmp_path / str(number)
        pool.run(live, [job(first, out, CHANGED_AT), job(then, out, STEPS)], world_size=2)
        assert losses(out) == losses(whole) and bits(out) == bits(whole)
    killed = tmp_path / "killed"
    with pytest.raises(RanksFailedError):
        pool.run(dies, job(disk, killed, STEPS), world_size=2)
    pool.run(live, [job(disk, killed, STEPS)], world_size=2)
    assert losses(killed) == losses(whole) and bits(killed) == bits(whole)
    assert list(files.iterdir()) == []

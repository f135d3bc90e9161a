"""A rank's phases: one epoch after another in one process, and nothing of a failed one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train.small_jobs import CHANGED_AT, FIRST, OTHER, SECOND, SMALL, STEPS, job, losses

from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.rendezvous import Rendezvous
from weft.config.errors import RunError
from weft.elastic.pool import WorkerPool
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan
from weft.platform.cpu import CpuPlatform
from weft.train import worker
from weft.train.assemble import Built
from weft.train.engine import Engine
from weft.train.family import assemble_model
from weft.train.job import Job
from weft.train.stop import StopSignal
from weft.train.worker import RankLife


def live(address: RankAddress, jobs: list[Job]) -> tuple[list[int], str, list[bool]]:
    """One epoch for each job, in this process; the phase in which the rank was at last; for each
    whether products of fp32 numbers may go through TF32."""
    asked: list[bool] = []
    assert address.store_file is not None
    phases = address.store_file.with_name(f"phase-{address.rank}")
    address = replace(address, phase_file=phases)
    with Rendezvous(address, 60.0) as rendezvous:
        life = RankLife(rendezvous, StopSignal())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CpuPlatform, "multiply_fp32", lambda _, *, tf32: asked.append(tf32))
            return [life.epoch(each) for each in jobs], phases.read_text(), asked


@pytest.mark.parametrize("second", [SECOND, OTHER], ids=["schedule", "groups"])
def test_a_rank_leaves_and_joins_again_with_another_plan(
    tmp_path: Path, pool: WorkerPool, second: list[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pool.run(live, [job(FIRST, whole, STEPS)], world_size=2)
    first, then = job(FIRST, parts, CHANGED_AT), job(second, parts, STEPS)
    compute = then.config.compute.model_copy(update={"tf32": True})
    jobs = [first, replace(then, config=then.config.model_copy(update={"compute": compute}))]
    lives = pool.run(live, jobs, world_size=2)
    assert lives == [([CHANGED_AT, STEPS], "leave", [False, True])] * 2
    expected, found = losses(whole), losses(parts)
    assert len(expected) == STEPS
    if second is SECOND:
        assert found == expected
    else:
        assert found == pytest.approx(expected, rel=1e-5)


def fails_once(address: RankAddress, broken: Job, sound: Job) -> tuple[str, list[int]]:
    """An epoch that fails while it builds, and the next one at the same rendezvous."""
    with Rendezvous(address, 60.0) as rendezvous:
        life = RankLife(rendezvous, StopSignal())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "assemble_model", without_the_others)
            try:
                life.epoch(broken)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next epoch begins
                said = f"{type(error).__name__}: {error}"
        return said, [life.epoch(sound)]


def without_the_others(plan: Plan, spec: ModelSpec, comm: Comm, **settings: Any) -> Built:
    comm.close(abort=True)
    return assemble_model(plan, spec, comm, **settings)


def test_after_a_failed_epoch_the_next_one_begins(tmp_path: Path, pool: WorkerPool) -> None:
    jobs = [job(OTHER, tmp_path / name, 1) for name in ("broken", "sound")]
    for rank, (said, done) in enumerate(pool.run(fails_once, *jobs, world_size=2)):
        assert (said, done) == (f"CommError: rank {rank}: this epoch was closed", [1])


FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.65 GiB."


def is_full_once(address: RankAddress, one: Job) -> tuple[str, list[int]]:
    """The last rank's card is full in the third step; then the same job is begun again."""
    with Rendezvous(address, 60.0) as rendezvous:
        life = RankLife(rendezvous, StopSignal())
        step, done = Engine.step, []

        def fills(engine: Engine, *given: Any, **settings: Any) -> Any:
            done.append(0)
            if address.rank == 1 and len(done) == 3:
                raise torch.OutOfMemoryError(FULL)
            return step(engine, *given, **settings)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "step", fills)
            with pytest.raises(RunError) as caught:
                life.epoch(one)
        return f"{type(caught.value).__name__}: {caught.value}", [life.epoch(one)]


def test_a_full_card_ends_every_rank_and_nothing_is_lost(tmp_path: Path, pool: WorkerPool) -> None:
    """One sentence of the rank that it happened to; what was saved is gone on from."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    asked = [*SMALL, "plan.shares=[2,2]", "checkpoint.every=1", "train.eval_every=0"]
    pool.run(live, [job(asked, whole, STEPS)], world_size=2)
    (peer, _), (said, done) = pool.run(is_full_once, job(asked, parts, STEPS), world_size=2)
    assert peer.startswith("CommError: ")
    assert said == (
        "RunError: cpu has too little memory: CUDA out of memory. Tried to allocate 2.00 GiB. "
        "Compute layers again in backward (activation checkpointing, recompute: full). "
        "What was saved stays: the same command goes on from there."
    )
    assert done == [STEPS]
    assert losses(parts) == losses(whole)

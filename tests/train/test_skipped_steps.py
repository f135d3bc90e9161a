"""``recovery.when_not_finite: skip``: a step whose numbers are none changes nothing, anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from train.test_diverged import kept
from train.test_saving import CONFIG, SPEC, plan_of

from weft.checkpoint.remote.owner import Owner
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.config.errors import DivergedError
from weft.config.optim_sections import AdamWConfig
from weft.config.sections import CheckpointConfig, RecoveryConfig, TrainConfig
from weft.data.batch import Batch
from weft.data.synthetic import SyntheticDataset
from weft.diagnose.verify import Rehearsal, rehearsing, synthetic_microbatches
from weft.elastic.pool import WorkerPool
from weft.models.llama.sizes import SIZES
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.platform.cpu import CpuPlatform
from weft.report.events import EVENTS_FILE, EventLog, read_events
from weft.report.progress import Progress
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.loop import Run, StepRecord, train
from weft.train.running import note_events, save_now_and_then
from weft.train.saver import Saver
from weft.train.watch import end_when_diverged

STEPS = 5


@dataclass(frozen=True)
class Trained:
    """What came of a run."""

    losses: list[float]
    params: list[torch.Tensor]
    updates: int
    said: list[str]


def trained(folder: Path, *, weights: dict[int, float], limit: int = 3) -> Trained:
    """Train with skips, saving each step; of some steps (from 0) the batch has these weights."""
    root = folder / "checkpoints"
    config = CONFIG.model_copy(
        update={
            "train": TrainConfig(steps=STEPS, stop_after_non_finite=limit),
            "checkpoint": CheckpointConfig(every=1, keep=1, asynchronous=False),
            "recovery": RecoveryConfig(when_not_finite="skip"),
        }
    )
    comm, plan = Comm(), plan_of(6)
    skips = config.recovery.skips
    built = assemble_model(plan, SPEC, comm, optim=config.optim, seq_len=16, skips_non_finite=skips)
    fill(built.gradients, initial(1))
    run = Run(
        config=config,
        plan=plan,
        spec=SPEC,
        comm=comm,
        platform=CpuPlatform(),
        built=built,
        batches=batches(weights),
        first_step=0,
        last_step=STEPS,
        events=EventLog(folder),
    )
    losses: list[float] = []
    said: list[str] = []

    def hook(record: StepRecord) -> None:
        losses.extend(numbers.loss for numbers in record.read)

    with Progress(STEPS, log_every=1, mode="quiet", stream=StringIO()) as progress:
        saver = Saver(run, root, root, owner=Owner(), fingerprint="same", tell=progress.warn)
        hooks = [note_events(run, said.append), save_now_and_then(run, saver, progress)]
        train(run, [hook, *hooks, end_when_diverged(run, saver, root, folder)])
    params = [main.value.clone() for main in built.gradients.mains]
    return Trained(losses, params, built.optimizer.num_updates, said)


def batches(weights: dict[int, float]) -> Iterator[Batch]:
    data = SyntheticDataset(vocab_size=SPEC.vocab_size, seq_len=16, seed=3)
    for step in range(STEPS):
        batch = data.batch(range(6 * step, 6 * step + 6))
        if step in weights:
            batch.weights[:] = weights[step]
        yield batch


def test_a_bad_batch_is_as_one_that_counts_nothing(tmp_path: Path) -> None:
    """The reference: weights of zero, whose step changes nothing whatever the policy is."""
    ways = [{2: math.inf, 4: math.inf}, {2: 0.0, 4: 0.0}]
    folders = [tmp_path / "bad", tmp_path / "without"]
    for folder in folders:
        folder.mkdir()
    bad, without = (trained(f, weights=way) for f, way in zip(folders, ways, strict=True))
    assert [math.isfinite(loss) for loss in bad.losses] == [True, True, False, True, False]
    assert [bad.losses[n] for n in (0, 1, 3)] == [without.losses[n] for n in (0, 1, 3)]
    assert bad.updates == without.updates == 3
    assert all(map(torch.equal, bad.params, without.params)), "bit for bit"
    assert kept(folders[0] / "checkpoints") == [(5, True)], "the last step is an end like any other"
    skipped = [e for e in read_events(folders[0] / EVENTS_FILE) if e.kind == "not_finite"]
    assert [(e.step, e.facts["skipped"]) for e in skipped] == [(3, True), (5, True)]
    assert [words.partition(":")[0] for words in bad.said] == ["step 3", "step 5"]
    assert without.said == []


def test_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"at step 4, and no finite numbers since step 1\."):
        trained(tmp_path, weights=dict.fromkeys((1, 2, 3), math.inf))
    assert kept(tmp_path / "checkpoints")[-1][1], "what was before them"


def stage(ranks: tuple[int, ...], layers: tuple[int, int], **axes: int) -> StagePlan:
    return StagePlan(mesh=Mesh.of(ranks, **axes), layers=layers, precision="fp32")


def split(*stages: StagePlan) -> Plan:
    return Plan(num_layers=2, pipelines=(PipelinePlan(stages=stages, samples=4, microbatch=2),))


def one_is_bad(address: RankAddress, plan: Plan, job: Rehearsal) -> list[tuple[bool, bool]]:
    """Of each step: its loss is finite, and something changed. In the second the last rank's part
    of the batch is bad, and that of no other."""
    with rehearsing(address, plan, job) as (comm, built):
        fill(built.gradients, initial(job.seed))
        built.optimizer.lr, built.engine.skips_non_finite = 0.01, True
        told: list[tuple[bool, bool]] = []
        for step in range(3):
            parts: list[Any] = synthetic_microbatches(comm, plan, job, step)
            if step == 1 and comm.rank == plan.world_size - 1:
                for part in parts:
                    part.tensors["weights"][0, 0] = math.inf
            before = [main.value.clone() for main in built.gradients.mains]
            result = built.engine.step(parts)
            now = (main.value for main in built.gradients.mains)
            told.append((math.isfinite(result.loss), not all(map(torch.equal, before, now))))
        return told


@pytest.mark.parametrize(
    "plan",
    [split(stage((0, 1), (0, 2), dp=2)), split(stage((0,), (0, 1)), stage((1,), (1, 2)))],
    ids=["dp", "pp"],
)
def test_all_ranks_skip_what_is_bad_on_one(pool: WorkerPool, plan: Plan) -> None:
    spec = replace(SIZES["debug-1m"].reduced(), num_layers=2)
    job = Rehearsal(spec=spec, optim=AdamWConfig(), seq_len=16, seed=1, steps=3)
    for told in pool.run(one_is_bad, plan, job, world_size=2):
        assert told == [(True, True), (False, False), (True, True)]

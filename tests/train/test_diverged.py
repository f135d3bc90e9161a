"""A run whose numbers are none ends, and keeps the last checkpoint that holds some."""

from __future__ import annotations

import math
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from train.test_saving import CONFIG, SPEC, plan_of

from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.listing import list_checkpoints
from weft.checkpoint.reader import open_checkpoint
from weft.checkpoint.remote.owner import Owner
from weft.checkpoint.store import read_latest
from weft.cli.main import run as command
from weft.comm.abort import Abort
from weft.comm.comm import Comm
from weft.config.errors import DivergedError
from weft.config.sections import CheckpointConfig, RecoveryConfig, TrainConfig
from weft.data.synthetic import SyntheticDataset
from weft.platform.cpu import CpuPlatform
from weft.report.progress import Progress
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.loop import Run, StepNumbers, StepRecord, train
from weft.train.running import leave_when_wanted, save_now_and_then
from weft.train.saver import Saver
from weft.train.watch import end_when_diverged

STEPS = 8
LIMIT = TrainConfig(steps=99, stop_after_non_finite=3)


def poisoned(root: Path, *, after: int, limit: int, early: bool = False) -> list[StepRecord]:
    """Train ``STEPS`` steps, saving each; a parameter is no number once one of them is done.

    ``early``: before that step is saved.
    """
    config = CONFIG.model_copy(
        update={
            "train": TrainConfig(steps=STEPS, stop_after_non_finite=limit),
            "checkpoint": CheckpointConfig(every=1, keep=1, asynchronous=False),
        }
    )
    comm, plan = Comm(), plan_of(6)
    built = assemble_model(plan, SPEC, comm, optim=config.optim, seq_len=16)
    fill(built.gradients, initial(1))
    data = SyntheticDataset(vocab_size=SPEC.vocab_size, seq_len=16, seed=3)
    run = Run(
        config=config,
        plan=plan,
        spec=SPEC,
        comm=comm,
        platform=CpuPlatform(),
        built=built,
        batches=(data.batch(range(6 * step, 6 * step + 6)) for step in range(STEPS)),
        first_step=0,
        last_step=STEPS,
    )
    records: list[StepRecord] = []

    def poison(record: StepRecord) -> None:
        if record.step == after:
            with torch.no_grad():
                built.gradients.mains[0].value.fill_(math.nan)
            built.gradients.publish()

    with Progress(STEPS, log_every=1, mode="quiet", stream=StringIO()) as progress:
        saver = Saver(run, root, root, owner=Owner(), fingerprint="same", tell=progress.warn)
        saves = save_now_and_then(run, saver, progress)
        ends = end_when_diverged(run, saver, root, root.parent)
        hooks = [poison, saves, ends] if early else [saves, ends, poison]
        train(run, [records.append, *hooks])
    return records


def kept(root: Path) -> list[tuple[int, bool]]:
    """Step and whether it is finite, of every checkpoint."""
    return [(row.step, row.finite) for row in list_checkpoints(root) if row.complete]


def test_training_ends_and_the_last_finite_checkpoint_stays(tmp_path: Path) -> None:
    root = tmp_path / "mine/checkpoints"
    with pytest.raises(DivergedError) as ended:
        poisoned(root, after=3, limit=4)
    assert str(ended.value) == (
        "training has diverged: loss nan, grad_norm nan at step 7, and no finite numbers since "
        "step 3. The last finite checkpoint is step-00000003: the same command with --out "
        f"{root.parent} goes on from there. A lower optim.lr, a longer warm-up or "
        "optim.max_grad_norm may help"
    )
    assert kept(root) == [(3, True)]
    assert open_checkpoint(root).step == 3
    assert open_checkpoint(root).state["finite"] is True


def test_a_last_step_that_is_not_finite_is_no_end(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"at step 8, and no finite numbers since step 7\."):
        poisoned(tmp_path / "checkpoints", after=7, limit=4)
    assert kept(tmp_path / "checkpoints") == [(7, True)]


def test_without_a_limit_the_last_finite_checkpoint_stays_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And where ``latest`` names another one, a later end says what to do."""
    root = tmp_path / "checkpoints"
    records = poisoned(root, after=3, limit=0)
    assert [record.is_finite for record in records] == [True] * 3 + [False] * 5
    assert kept(root) == [(3, True), (8, False)]
    assert read_latest(root) == "step-00000008"
    assert command(["checkpoint", "ls", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())  # a narrow table has several lines a row
    assert text.endswith("complete, not finite, latest") and text.count("complete") == 2
    said = f"step-00000003: write step-00000003 into {root}/latest, then the same command with"
    with pytest.raises(DivergedError, match=said):
        poisoned(root, after=1, limit=2, early=True)


@pytest.mark.parametrize("after", [1, STEPS])
def test_values_are_looked_at_too(tmp_path: Path, after: int) -> None:
    """The numbers of a step say nothing of what its update made of the parameters."""
    problem = "rank 0: parameters or the optimizer's state are not finite"
    expected = DivergedError if after < STEPS else CheckpointError
    said = r"Nothing finite was saved\. .*another --out" if after < STEPS else problem
    with pytest.raises(expected, match=said):
        poisoned(tmp_path / "checkpoints", after=after, limit=2, early=True)
    assert not list(tmp_path.glob("checkpoints/*.tmp"))
    assert after == STEPS or not (tmp_path / "checkpoints").exists()


def numbers(step: int, loss: float, *, move: bool = False) -> StepNumbers:
    return StepNumbers(
        step=step,
        lr=0.0,
        loss=loss,
        grad_norm=1.0,
        skipped=False,
        loss_scale=None,
        stop=0.0,
        save=False,
        move=move,
        data=0,
        seconds=1.0,
        ended=0.0,
    )


def test_steps_that_are_read_together_end_training_as_those_that_are_not(tmp_path: Path) -> None:
    """Where a device is not waited for: three that are not finite, and then one that is."""
    run: Any = SimpleNamespace(config=CONFIG.model_copy(update={"train": LIMIT}), last_step=99)
    saver: Any = SimpleNamespace(settle=lambda: None)
    ends = end_when_diverged(run, saver, tmp_path / "checkpoints", tmp_path)
    ends(StepRecord(step=3, read=[numbers(3, math.nan)]))
    ends(StepRecord(step=4, read=[]))
    losses = [math.nan, 2.0, math.nan, 2.0]
    ends(StepRecord(step=7, read=[numbers(4 + n, loss) for n, loss in enumerate(losses)]))
    losses = [math.nan, math.inf, math.nan, 2.0, math.nan]
    said = "loss nan, grad_norm 1.0 at step 10, and no finite numbers since step 7"
    with pytest.raises(DivergedError, match=said):
        ends(StepRecord(step=12, read=[numbers(8 + n, loss) for n, loss in enumerate(losses)]))


def test_a_step_that_changed_nothing_may_be_left_after(tmp_path: Path) -> None:
    """As it may be saved: its state is that of the step before."""
    recovery = RecoveryConfig(when_not_finite="skip")
    config = CONFIG.model_copy(update={"recovery": recovery})
    run: Any = SimpleNamespace(config=config, last_step=99, abort=Abort())
    kept: list[bool] = []

    def keep(step: int, *, finite: bool) -> bool:
        kept.append(finite)
        return True

    saver: Any = SimpleNamespace(keep=keep)
    record = StepRecord(step=3, read=[numbers(3, math.nan, move=True)])
    leave_when_wanted(run, saver)(record)
    assert (kept, run.abort.left) == ([True], True)

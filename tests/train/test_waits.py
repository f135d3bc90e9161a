"""A step waits for the device at most once, and not at all between those that are logged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch
from train.test_saving import CONFIG, SPEC, plan_of

from weft.comm.comm import Comm
from weft.config.sections import CheckpointConfig, TrainConfig
from weft.data.synthetic import SyntheticDataset
from weft.platform.cpu import CpuPlatform
from weft.report.metrics import EvalMetrics, StepMetrics, Writer
from weft.report.progress import Progress
from weft.resolve.peaks import Peak
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.loop import Run, StepRecord, train, waits_for_reads
from weft.train.running import log_metrics, note_step

READS: dict[str, Any] = {
    "item": torch.Tensor.item,
    "tolist": torch.Tensor.tolist,
    "__float__": torch.Tensor.__float__,
    "__int__": torch.Tensor.__int__,
    "__bool__": torch.Tensor.__bool__,
    "__index__": torch.Tensor.__index__,
}
STEPS = 12


class Waiting(Run):
    """As if its numbers lay in a device's memory."""

    @property
    def waits_for_reads(self) -> bool:
        return True


class Kept(Writer):
    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []

    def write(self, metrics: StepMetrics | EvalMetrics) -> None:
        if isinstance(metrics, StepMetrics):
            self.steps.append(metrics)

    def close(self) -> None: ...


def run_with(
    kind: type[Run], log_every: int, *, stop_at: int = 0
) -> tuple[Run, Kept, dict[int, int]]:
    """What was logged, and how often a tensor was read in each step."""
    train_config = TrainConfig(steps=STEPS, log_every=log_every)
    config = CONFIG.model_copy(
        update={"train": train_config, "checkpoint": CheckpointConfig(every=8)}
    )
    comm, plan = Comm(), plan_of(6)
    built = assemble_model(plan, SPEC, comm, optim=config.optim, seq_len=16)
    built.optimizer.is_host = kind is Run
    fill(built.gradients, initial(1))
    data = SyntheticDataset(vocab_size=SPEC.vocab_size, seq_len=16, seed=3)
    run = kind(
        config=config,
        plan=plan,
        spec=SPEC,
        comm=comm,
        platform=CpuPlatform(),
        built=built,
        # On a processor attention looks where documents begin; on a device it does not.
        batches=(
            replace(data.batch(range(6 * step, 6 * step + 6)), segments=None)
            for step in range(STEPS)
        ),
        first_step=0,
        last_step=STEPS,
    )
    kept, reads = Kept(), dict.fromkeys(range(1, STEPS + 1), 0)
    with (
        Progress(STEPS, log_every=log_every, mode="quiet", stream=StringIO()) as progress,
        counting() as counted,
    ):

        def note(record: StepRecord) -> None:
            reads[record.step] += counted.pop("reads", 0)
            run.stop.asked = record.step == stop_at or run.stop.asked

        log = log_metrics(run, [kept], progress, started=0.0, peak=Peak())
        train(run, [note_step(run), log, note])
    return run, kept, reads


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Every way that Python has to look at a tensor's numbers."""
    counted = Counter[str]()

    def wrapped(read: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted["reads"] += 1
            return read(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, read in READS.items():
            patch.setattr(torch.Tensor, name, wrapped(read))
        yield counted


def test_numbers_are_read_once_where_they_are_logged_and_nowhere_else() -> None:
    _, kept, reads = run_with(Waiting, log_every=5)
    looked = (1, 5, 8, 10, 12)  # the first, logged ones, before a checkpoint, the last
    assert reads == {step: int(step in looked) for step in range(1, STEPS + 1)}
    assert [metrics.step for metrics in kept.steps] == list(range(1, STEPS + 1))


def test_numbers_read_late_are_those_read_at_once() -> None:
    run, kept, _ = run_with(Run, log_every=5)
    _, late, _ = run_with(Waiting, log_every=5)
    assert not run.waits_for_reads
    times = {"step_time_s", "tokens_per_s", "memory_gib", "elapsed_s", "mfu"}
    for now, later in zip(kept.steps, late.steps, strict=True):
        for name in StepMetrics.__slots__:
            if name not in times:
                assert getattr(now, name) == getattr(later, name), name
    elapsed = [metrics.elapsed_s for metrics in late.steps]
    assert elapsed == sorted(elapsed)
    assert all(metrics.step_time_s > 0 for metrics in late.steps)


@pytest.mark.parametrize(("kind", "stopped_after"), [(Run, 4), (Waiting, 5)])
def test_a_request_to_stop_is_heeded_when_numbers_are_read(
    kind: type[Run], stopped_after: int
) -> None:
    """Asked after step 3; the totals of step 4 say so."""
    _, kept, _ = run_with(kind, log_every=5, stop_at=3)
    assert kept.steps[-1].step == stopped_after


def test_only_plans_of_processors_read_each_step() -> None:
    assert not waits_for_reads(plan_of(4, 2))
    plan = plan_of(4, 2)
    stage = plan.pipelines[1].stages[0]

    other = replace(plan.pipelines[1], stages=(replace(stage, device="cuda"),))
    assert waits_for_reads(replace(plan, pipelines=(plan.pipelines[0], other)))

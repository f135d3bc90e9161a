"""What happens after a step besides training, in the order that ``worker`` puts it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import torch

from weft.checkpoint.entry import CheckpointError
from weft.cost.flops import train_flops_per_token
from weft.data.batch import Dataset
from weft.precision.registry import PRECISIONS
from weft.report.metrics import EvalMetrics, StepMetrics, Writer
from weft.report.progress import Progress
from weft.train.evaluate import Evaluation, evaluate
from weft.train.loop import Hook, Run, StepRecord
from weft.train.saving import save


def measure_peak(run: Run) -> float:
    """FLOP/s that all ranks together reach in a large matrix product of their dtype. Collective."""
    dtype = PRECISIONS[run.plan.seat(run.comm.rank).stage_plan.precision].compute.dtype
    run.comm.barrier(name="measure peak")
    mine = run.platform.matmul_flops(dtype, run.comm.device)
    total = torch.tensor(mine, dtype=torch.float64, device=run.comm.device)
    run.comm.all_reduce(total, name="measure peak")
    return float(total)


def note_step(run: Run) -> Hook:
    """Let the flight recorder know how far training has come."""

    def hook(record: StepRecord) -> None:
        run.comm.flight.step = record.step

    return hook


def log_metrics(
    run: Run,
    writers: Sequence[Writer],
    progress: Progress,
    *,
    peak_flops: float,
    predicted_s: float | None = None,
) -> Hook:
    """Write and show the numbers of every step; ask all ranks for their memory now and then.

    ``predicted_s``: what a step was expected to take.
    """
    seq_len = run.config.data.seq_len
    tokens = run.plan.global_batch * seq_len
    flops = train_flops_per_token(run.spec, seq_len) * tokens
    started = time.perf_counter()
    memory = [0.0]
    warn_of_divergence = _DivergenceWarning(progress)

    def hook(record: StepRecord) -> None:
        is_edge = record.step in (run.first_step + 1, run.last_step)
        if is_edge or record.step % run.config.train.log_every == 0:
            everyone = run.comm.gather_json(run.platform.peak_memory_gib(), name="peak memory")
            memory[0] = max(everyone)
        for numbers in record.read if run.is_main else ():
            metrics = StepMetrics(
                step=numbers.step,
                loss=numbers.loss,
                tokens=tokens,
                grad_norm=numbers.grad_norm,
                lr=numbers.lr,
                step_time_s=numbers.seconds,
                predicted_step_time_s=predicted_s,
                tokens_per_s=tokens / numbers.seconds,
                memory_gib=memory[0],
                mfu=flops / numbers.seconds / peak_flops if peak_flops else None,
                samples=numbers.step * run.plan.global_batch,
                data=numbers.data,
                elapsed_s=numbers.ended - started,
            )
            for writer in writers:
                writer.write(metrics)
            progress.step(metrics)
            warn_of_divergence(metrics)

    return hook


class _DivergenceWarning:
    """Says once that the numbers of a run have stopped being numbers."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._said = False

    def __call__(self, metrics: StepMetrics) -> None:
        if self._said or (math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)):
            return
        self._said = True
        self._progress.warn(
            f"step {metrics.step}: loss {metrics.loss}, grad_norm {metrics.grad_norm}: training "
            "has diverged. A lower optim.lr, a longer warm-up or optim.max_grad_norm may help"
        )


def evaluate_now_and_then(
    run: Run,
    data: Dataset,
    positions: np.ndarray,
    report: Callable[[int, Evaluation], None],
) -> Hook:
    """Evaluate every ``train.eval_every`` steps, the last step apart: its result is the run's."""
    every = run.config.train.eval_every

    def hook(record: StepRecord) -> None:
        if every and record.step % every == 0 and record.step != run.last_step:
            report(record.step, evaluate(run, data, positions))

    return hook


def report_evaluation(
    run: Run, writers: Sequence[Writer], progress: Progress, *, written: Collection[int] = ()
) -> Callable[[int, Evaluation], None]:
    """Show and write what an evaluation found; on rank 0.

    ``written``: steps whose evaluation an earlier start has written, to be shown only.
    """
    started = time.perf_counter()

    def report(step: int, found: Evaluation) -> None:
        if run.is_main:
            metrics = EvalMetrics(
                step=step,
                eval_loss=found.loss,
                eval_tokens=found.tokens,
                elapsed_s=time.perf_counter() - started,
            )
            for writer in writers if step not in written else ():
                writer.write(metrics)
            progress.eval(metrics)

    return report


def save_now_and_then(run: Run, root: Path, progress: Progress, *, fingerprint: str) -> Hook:
    """Save every ``checkpoint.every`` steps, at the end, and when asked to stop.

    A save that fails in between is reported and training goes on; at the end it is an error.
    """
    every = run.config.checkpoint.every

    def hook(record: StepRecord) -> None:
        is_end = record.step == run.last_step or record.stops
        if not is_end and not (every and record.step % every == 0):
            return
        try:
            save(run, root, record.step, fingerprint=fingerprint)
        except CheckpointError as error:
            if is_end:
                raise
            progress.warn(f"no checkpoint at step {record.step}: {error}")

    return hook

"""The phase of a rank in which it trains: from its data to the last metrics."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from weft.data.batch import Batch
from weft.data.loader import Loader
from weft.data.prepare import Prepared
from weft.data.tokenizer import copy_tokenizer
from weft.report.metrics import JsonlWriter, Writer, optional_writers, read_metrics
from weft.report.progress import Progress
from weft.train.evaluate import evaluate, held_out_positions
from weft.train.hooks import (
    evaluate_now_and_then,
    log_metrics,
    measure_peak,
    note_step,
    report_evaluation,
    save_now_and_then,
)
from weft.train.job import Job
from weft.train.loop import Run, train
from weft.train.run_folder import write_text
from weft.train.stop import interrupts_held
from weft.train.summary import finish_run, used_by_ranks
from weft.train.traffic import Traffic


def write_files(job: Job, data: Prepared) -> None:
    """Everything was accepted: say in the run folder what is run."""
    for name, text in job.files.items():
        write_text(job.out / name, text)
    copy_tokenizer(data.tokenizer_file, job.out)


def batches(
    job: Job, data: Prepared, rank: int, first_step: int, stack: ExitStack
) -> Iterator[Batch]:
    """A rank's samples of one step after the other; ``stack`` ends the processes that read them."""
    config, plan = job.config.data, job.plan
    ranges = plan.seat(rank).microbatches()
    with interrupts_held():
        loader = Loader(
            data.train,
            global_batch=plan.global_batch,
            offsets=[position for part in ranges for position in part],
            first_step=first_step,
            last_step=job.last_step,
            workers=config.workers,
            prefetch=config.prefetch,
            context=multiprocessing.get_context("forkserver"),
        )
    stack.callback(loader.close)
    return iter(loader)


@dataclass(frozen=True)
class Training:
    """Trains with what ``Run`` holds, and leaves in the run folder what came of it."""

    job: Job
    data: Prepared
    notes: Sequence[str]
    """What is worth knowing of the checkpoint that the run goes on from."""
    stack: ExitStack
    """Closes what is opened here."""

    def train(self, run: Run) -> int:
        """To the last step, or until some rank is asked to stop. Returns the steps done."""
        job, data, started = self.job, self.data, time.perf_counter()
        writers = self._writers(run) if run.is_main else []
        held_out = data.held_out.open()
        positions = held_out_positions(held_out.num_samples, job.config.train.eval_samples)
        with self._progress(run) as progress:
            written = self._evaluated() if run.is_main else []
            report = report_evaluation(run, writers, progress, written=written)
            traffic = Traffic(run)
            hooks = [
                note_step(run),
                traffic.count,
                log_metrics(
                    run,
                    writers,
                    progress,
                    peak_flops=measure_peak(run),
                    predicted_s=self._predicted_s(),
                ),
                # Before saving: what a checkpoint comes after is in metrics.jsonl, and stays there.
                evaluate_now_and_then(run, held_out, positions, report),
                save_now_and_then(run, job.checkpoints, progress, fingerprint=data.fingerprint),
                traffic.skip,
            ]
            _say_start(run, progress, self.notes if run.is_main else ())
            traffic.begin()
            done = train(run, hooks)
            used = used_by_ranks(run, traffic)
            if job.comm_report:
                traffic.write(job.out)
            if done == run.last_step:
                final = evaluate(run, held_out, positions)
                report(done, final)
        if run.is_main and done == run.last_step:
            wall_s = time.perf_counter() - started
            finish_run(run, job, data, final, positions, used=used, wall_s=wall_s)
        return done

    def _predicted_s(self) -> float | None:
        prediction = self.job.prediction
        return None if prediction is None else prediction.quantities.step_time_s

    def _writers(self, run: Run) -> list[Writer]:
        out = self.job.out
        resume_after = run.first_step if run.first_step else None
        writers: list[Writer] = [JsonlWriter(out / "metrics.jsonl", resume_after)]
        writers += optional_writers(self.job.config.metrics, out, run.first_step)
        for writer in writers:
            self.stack.callback(writer.close)
        return writers

    def _evaluated(self) -> list[int]:
        """Steps whose evaluation metrics.jsonl holds, now that later lines were dropped from it."""
        _, evaluations = read_metrics(self.job.out / "metrics.jsonl")
        return [metrics.step for metrics in evaluations]

    def _progress(self, run: Run) -> Progress:
        mode = self.job.console if run.is_main else "quiet"
        stream = sys.stderr if self.job.json else sys.stdout
        return Progress(
            run.last_step, log_every=self.job.config.train.log_every, mode=mode, stream=stream
        )


def _say_start(run: Run, progress: Progress, notes: Sequence[str]) -> None:
    """What is worth knowing before the first step: how ranks talk where that is a choice."""
    for note in notes:
        progress.warn(f"note: {note}")
    if {member.backend for member in run.comm.members} != {"gloo"}:
        for line in run.comm.transports():
            progress.message(line)
    if run.first_step:
        progress.message(f"going on after step {run.first_step}")

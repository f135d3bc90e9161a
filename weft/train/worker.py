"""One rank of a training run, from joining the job to its end."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

import torch

from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.reader import Checkpoint, open_checkpoint
from weft.checkpoint.store import LATEST, candidates
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.heartbeat import with_heartbeat
from weft.config.errors import ConfigError, ConfigErrors, show
from weft.data.batch import Batch
from weft.data.loader import Loader
from weft.data.prepare import Prepared, prepare
from weft.data.tokenizer import copy_tokenizer
from weft.models.registry import model_spec
from weft.plan.model import ModelSpec
from weft.platform.base import Platform
from weft.report.metrics import JsonlWriter, Writer, optional_writers, read_metrics
from weft.report.progress import Progress
from weft.train.assemble import Built, fill, initial
from weft.train.consistency import refuse_unlike_files, refuse_unlike_ranks
from weft.train.evaluate import evaluate, held_out_positions
from weft.train.family import assemble_model
from weft.train.hooks import (
    evaluate_now_and_then,
    log_metrics,
    measure_peak,
    note_step,
    report_evaluation,
    save_now_and_then,
)
from weft.train.job import Job
from weft.train.joining import join_plan
from weft.train.loop import Run, train
from weft.train.run_folder import LOGS, write_text
from weft.train.saving import restore
from weft.train.stop import StopSignal, interrupts_held
from weft.train.summary import finish_run, used_by_ranks
from weft.train.traffic import Traffic


def main(address: RankAddress, job: Job) -> None:
    """Train. The same in a rank that Weft started and in one that torchrun started."""
    stop = StopSignal()
    stop.listen()
    torch.set_num_threads(job.threads)
    timeout_s = job.config.train.timeout_s
    comm, platform = join_plan(address, job.plan, timeout_s=timeout_s)
    comm.flight.keep_in(job.out / LOGS, patience_s=timeout_s / 2)
    with ExitStack() as stack:
        stack.callback(comm.close)
        refuse_unlike_ranks(comm, job)
        _Rank(comm, address.local_rank, platform, job, stack, stop).run()


@dataclass(frozen=True)
class _Rank:
    """The parts of one rank's life, in order."""

    comm: Comm
    local_rank: int
    platform: Platform
    job: Job
    stack: ExitStack
    stop: StopSignal

    def run(self) -> None:
        job, comm = self.job, self.comm
        data = self._prepare()
        seq_len = job.config.data.seq_len
        spec = model_spec(job.config.model, data.vocab_size, seq_len)
        checkpoint = self._checkpoint(data, spec)
        built = assemble_model(job.plan, spec, comm, optim=job.config.optim, seq_len=seq_len)
        if checkpoint is None:
            fill(built.gradients, initial(job.config.seed))
        else:
            _restore(built, checkpoint)
        first_step = 0 if checkpoint is None else checkpoint.step
        refuse_unlike_files(comm, first_step, data.fingerprint)
        if comm.rank == 0:
            self._write_files(data)
        run = Run(
            config=job.config,
            plan=job.plan,
            spec=spec,
            comm=comm,
            platform=self.platform,
            built=built,
            batches=self._batches(data, first_step),
            first_step=first_step,
            last_step=max(job.last_step, first_step),
            stop=self.stop,
        )
        self._train(run, data, notes=() if checkpoint is None else checkpoint.notes)

    def _prepare(self) -> Prepared:
        """The first process of each machine prepares the data; the others then just open it.

        Raises:
            ConfigError: on every rank, where any machine cannot use the data.
        """
        config = self.job.config
        prepared, refusal = with_heartbeat(self.comm, self._prepare_here, name="data preparation")
        refusals = self.comm.gather_json(refusal, name="data prepared")
        for text in filter(None, refusals):
            raise ConfigError("data", None, "", text)
        return prepared or prepare(config.data, config.seed, report=_silent)

    def _prepare_here(self) -> tuple[Prepared | None, str]:
        """The data, and why they cannot be used; neither where another process sees to it."""
        if self.local_rank:
            return None, ""
        try:
            return prepare(self.job.config.data, self.job.config.seed, report=_silent), ""
        except ConfigError as error:
            return None, str(error)

    def _checkpoint(self, data: Prepared, spec: ModelSpec) -> Checkpoint | None:
        """What to go on from; None for a new run.

        Raises:
            ConfigErrors: the checkpoint is of another model.
            ConfigError: it was made on other data.
            CheckpointError: there are checkpoints, and none that is whole.
        """
        root = self.job.checkpoints
        if not (root / LATEST).exists() and not (root.is_dir() and candidates(root)):
            return None
        with _way_out(f"Remove {root} to begin the run again."):
            checkpoint = open_checkpoint(root)
        _refuse_other_model(checkpoint, spec)
        saved = checkpoint.state.get("data")
        if checkpoint.step and saved != data.fingerprint:
            hint = "The sources or the tokenizer changed since. Train in another --out folder."
            raise ConfigError("data", data.fingerprint, f"the data of {root}: {saved}", hint)
        samples, batch = checkpoint.state.get("samples", 0), self.job.plan.global_batch
        if samples != checkpoint.step * batch:
            hint = "Other shares need micro or accumulation that keep the batch."
            expected = f"a batch with which {checkpoint.step} steps take {samples} samples"
            raise ConfigError("batch.samples", batch, expected, hint)
        return checkpoint

    def _write_files(self, data: Prepared) -> None:
        """Everything was accepted: say in the run folder what is run."""
        for name, text in self.job.files.items():
            write_text(self.job.out / name, text)
        copy_tokenizer(data.tokenizer_file, self.job.out)

    def _batches(self, data: Prepared, first_step: int) -> Iterator[Batch]:
        config, plan = self.job.config.data, self.job.plan
        ranges = plan.seat(self.comm.rank).microbatches()
        with interrupts_held():
            loader = Loader(
                data.train,
                global_batch=plan.global_batch,
                offsets=[position for part in ranges for position in part],
                first_step=first_step,
                last_step=self.job.last_step,
                workers=config.workers,
                prefetch=config.prefetch,
                context=multiprocessing.get_context("forkserver"),
            )
        self.stack.callback(loader.close)
        return iter(loader)

    def _train(self, run: Run, data: Prepared, notes: Sequence[str]) -> None:
        job, started = self.job, time.perf_counter()
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
            _say_start(run, progress, notes if run.is_main else ())
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


@contextmanager
def _way_out(hint: str) -> Iterator[None]:
    """Add to what is wrong with a checkpoint what can be done about it."""
    try:
        yield
    except CheckpointError as error:
        problem = f"{error.problem}. {hint}"
        raise CheckpointError(problem, file=error.file, tensor=error.tensor) from error


def _restore(built: Built, checkpoint: Checkpoint) -> None:
    folder = checkpoint.folder
    hint = f"Without {folder} the run goes on from the checkpoint before it, or begins again."
    with _way_out(hint):
        restore(built, checkpoint)


def _refuse_other_model(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Refuse to put weights into a model that computes something else with them.

    Raises:
        ConfigErrors: every number of the model that differs from the checkpoint's.
    """
    saved = checkpoint.state.get("model")
    now = json.loads(json.dumps(asdict(spec)))
    if not isinstance(saved, Mapping) or not now.keys() >= saved.keys():
        return  # restoring compares names and shapes
    wrong = [name for name in saved if name not in _MAY_DIFFER and saved[name] != now[name]]
    hint = f"The checkpoint in {checkpoint.folder} is of that model."
    if wrong:
        raise ConfigErrors(
            ConfigError(f"model.{name}", now[name], show(saved[name]), hint) for name in wrong
        )


_MAY_DIFFER = ("seq_len", "dropout")
"""What the same weights can be trained with. (The length of a position table is a shape.)"""


def _silent(*_: object) -> None:
    """Preparation was already shown by the command that started the ranks."""

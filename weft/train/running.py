"""The phase of a rank in which it trains, and what happens after each of its steps besides that."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple
from typing import Any, NamedTuple

import numpy as np

from weft.checkpoint.entry import CheckpointError
from weft.checkpoint.run_of import claim
from weft.cost.flops import pairs_of_a_token, train_flops_per_token
from weft.data.batch import Dataset, DatasetSpec, spread
from weft.data.even import evenly
from weft.data.left_out import WithoutSpec
from weft.data.loader import Loader
from weft.data.prepare import Prepared
from weft.data.tokenizer import copy_tokenizer
from weft.report.goodput import left_by
from weft.report.metrics import (
    EvalMetrics,
    JsonlWriter,
    StepMetrics,
    Writer,
    optional_writers,
    read_metrics,
)
from weft.report.progress import Progress
from weft.resolve.peaks import Peak, in_words, peak_of_all
from weft.train.agreeing import Agreed
from weft.train.balance import balance_now_and_then
from weft.train.job import Job
from weft.train.loop import Evaluation, Hook, Run, StepNumbers, StepRecord, evaluate, train
from weft.train.pace import Pace
from weft.train.profiling import Profile
from weft.train.run_folder import LOGS, write_text
from weft.train.saver import Saver
from weft.train.stop import signals_held
from weft.train.summary import finish_run
from weft.train.traffic import Traffic
from weft.train.watch import REMEDIES, end_when_diverged, watch_losses


def write_files(job: Job, data: Prepared) -> None:
    """Everything was accepted: say in the run folder what is run."""
    for name, text in job.files.items():
        write_text(job.out / name, text)
    copy_tokenizer(data.tokenizer_file, job.out)
    claim(job.checkpoints, job.out)


def batches(job: Job, agreed: Agreed, rank: int, first_step: int, stack: ExitStack) -> Loader:
    """A rank's samples of one step after the other; ``stack`` ends the processes that read them."""
    config, plan = job.config.data, job.plan
    ranges = plan.rank_plan(rank).microbatches()
    spec: DatasetSpec = agreed.data.train
    if config.balance_documents:
        cost = pairs_of_a_token(agreed.spec)
        spec = evenly(agreed.data.train, plan, cost)
    left_out = agreed.history.left_out
    with signals_held():
        loader = Loader(
            WithoutSpec(spec, left_out, plan.global_batch) if left_out.ranges else spec,
            global_batch=plan.global_batch,
            offsets=[position for part in ranges for position in part],
            first_step=first_step,
            last_step=job.last_step,
            workers=config.workers,
            prefetch=config.prefetch,
            context=multiprocessing.get_context("forkserver"),
        )
    stack.callback(loader.close)
    return loader


def run_job(run: Run, job: Job, data: Prepared, notes: Sequence[str], stack: ExitStack) -> int:
    """Train to the last step, or until some rank is asked to stop, and leave in the run folder what
    came of it. Returns the steps done.

    Args:
        notes: What is worth knowing of the checkpoint that the run goes on from.
        stack: Closes what is opened here.
    """
    started = time.perf_counter()
    held_out = data.held_out.open()
    positions = spread(held_out.num_samples, job.config.train.eval_samples)
    mode = job.console if run.is_main else "quiet"
    stream = sys.stderr if job.json else sys.stdout
    log_every = job.config.train.log_every
    with Progress(run.last_step, log_every=log_every, mode=mode, stream=stream) as progress:
        writers, written = _writers(run, job, stack, progress.warn) if run.is_main else ([], [])
        evaluated = evaluating(run, held_out, positions, writers, progress, written=written)
        traffic, pace = Traffic(run), Pace(run, job.prediction, progress.warn, job.out)
        predicted_s = job.prediction.quantities.step_time_s if job.prediction else None
        peak = reference_of_mfu(run, job)
        profile = Profile(run, job.out, asked=job.profile)
        stack.callback(profile.close)
        fingerprint = data.fingerprint
        logs, tell = job.out / LOGS, progress.warn
        saver = Saver(
            run, job.checkpoints, logs, owner=job.owner, fingerprint=fingerprint, tell=tell
        )
        stack.push(saver.leave)
        hooks = [
            profile.end,
            note_step(run),
            note_events(run, tell),
            traffic.count,
            pace.count,
            profile.tell,
            log_metrics(
                run,
                writers,
                progress,
                started=started,
                peak=peak,
                predicted_s=predicted_s,
                pace=pace,
            ),
            watch_losses(run, saver, job.checkpoints, job.out, tell),
            balance_now_and_then(run, job, tell, pace.forget),
            # Before saving: what a checkpoint comes after is in metrics.jsonl, and stays there.
            evaluate_now_and_then(run, evaluated),
            save_now_and_then(run, saver, progress),
            end_when_diverged(run, saver, job.checkpoints, job.out),
            leave_when_wanted(run, saver),
            profile.begin,
            traffic.skip,
            pace.skip,
        ]
        progress.message(in_words(peak))
        _say_start(run, progress, notes if run.is_main else ())
        traffic.skip()
        pace.skip()
        done = train(run, hooks)
        mine = {
            "memory_gib": run.platform.peak_memory_gib(),
            "sent_mb": traffic.sent_mb,
            "waits_s": pace.waits_s,
        }
        used = run.comm.gather_json(mine, name="used by ranks")
        if job.comm_report:
            traffic.write(job.out)
        if done == run.last_step:
            final = evaluated(done)
        is_end = done == run.last_step
        said = f"{'trained to' if is_end else 'stopped after'} step {done}"
        if not run.abort.left:
            run.events.write("end", said, step=done)
    if run.is_main and done == run.last_step:
        wall_s = time.perf_counter() - started
        finish_run(run, job, data, final, positions, used=used, peak=peak, wall_s=wall_s)
    return done


def _writers(
    run: Run, job: Job, stack: ExitStack, tell: Callable[[str], None]
) -> tuple[list[Writer], list[int]]:
    """And the steps whose evaluation metrics.jsonl holds, now that later lines were dropped."""
    file = job.out / "metrics.jsonl"
    before = left_by(file, run.first_step)
    writers: list[Writer] = [JsonlWriter(file, run.first_step or None, tell)]
    writers += optional_writers(job.config.metrics, job.out, run.first_step)
    for writer in writers:
        stack.callback(writer.close)
    _, evaluations = read_metrics(file)
    said = f"training goes on after step {run.first_step}" if run.first_step else "training begins"
    facts = {"world_size": run.comm.world_size, "startup_s": run.events.since_began_s}
    run.events.write("start", said, step=run.first_step, facts={**facts, **before})
    return writers, [metrics.step for metrics in evaluations]


def _say_start(run: Run, progress: Progress, notes: Sequence[str]) -> None:
    """What is worth knowing before the first step: how ranks talk where that is a choice."""
    for note in notes:
        progress.warn(f"note: {note}")
    if {member.backend for member in run.comm.members} != {"gloo"}:
        for line in run.comm.transports():
            progress.message(line)
    if run.first_step:
        progress.message(f"going on after step {run.first_step}")


def reference_of_mfu(run: Run, job: Job) -> Peak:
    """What MFU is measured against, from what each rank knows of its own chip. Collective."""
    mine = job.peaks.get(run.comm.rank, Peak())
    everyone = run.comm.gather_json(asdict(mine), name="peaks")
    return peak_of_all([Peak(**each) for each in everyone])


def note_step(run: Run) -> Hook:
    """Let the flight recorder know how far training has come."""

    def hook(record: StepRecord) -> None:
        run.comm.recorder.step = record.step

    return hook


def note_events(run: Run, tell: Callable[[str], None]) -> Hook:
    """Record that numbers have become none, and that ranks were asked to stop. ``tell``: say that
    a step was left out."""
    was_finite, skips = True, run.config.recovery.skips

    def hook(record: StepRecord) -> None:
        nonlocal was_finite
        for numbers in record.read:
            said = f"loss {numbers.loss}, grad_norm {numbers.grad_norm}"
            if skips and not numbers.is_finite:
                said += ": this step changes nothing (recovery.when_not_finite)"
                tell(f"step {numbers.step}: {said}")
            if not numbers.is_finite and (was_finite or skips):
                run.events.write("not_finite", said, step=numbers.step, facts={"skipped": skips})
            was_finite = numbers.is_finite
        if record.stops:
            asked = max(round(numbers.stop) for numbers in record.read)
            said = f"{asked} rank{'s were' if asked > 1 else ' was'} asked to stop"
            run.events.write("stop_asked", said, step=record.step, facts={"ranks": asked})

    return hook


def log_metrics(
    run: Run,
    writers: Sequence[Writer],
    progress: Progress,
    *,
    started: float,
    peak: Peak,
    predicted_s: float | None = None,
    pace: Pace | None = None,
) -> Hook:
    """Write and show the numbers of every step; ask all ranks for their memory now and then.

    Warns once when the numbers of the run have stopped being numbers, unless something is done
    about such steps.
    ``started``: by ``time.perf_counter``. ``peak``: of all chips together. ``predicted_s``: what a
    step was expected to take. ``pace``: looks at what ranks have taken.
    """
    seq_len = run.config.data.seq_len
    tokens = run.plan.global_batch * seq_len
    flops = train_flops_per_token(run.spec, seq_len) * tokens
    asked, is_warned = _Asked(), run.config.recovery.when_not_finite != "stop"

    def hook(record: StepRecord) -> None:
        nonlocal asked, is_warned
        if _is_logged(run, record.step):
            asked = _asked_all(run, record.step, pace)
        for numbers in record.read if run.is_main else ():
            metrics = StepMetrics(
                step=numbers.step,
                loss=numbers.loss,
                tokens=tokens,
                grad_norm=numbers.grad_norm,
                loss_scale=numbers.loss_scale,
                lr=numbers.lr,
                step_time_s=numbers.seconds,
                predicted_step_time_s=predicted_s,
                tokens_per_s=tokens / numbers.seconds,
                memory_gib=asked.memory_gib,
                mfu=flops / numbers.seconds / peak.flops if peak.flops else None,
                peak_tflops=peak.flops and peak.flops / 1e12,
                measured_tflops=peak.measured_flops and peak.measured_flops / 1e12,
                samples=numbers.step * run.plan.global_batch,
                data=numbers.data,
                imbalance_in_order=numbers.evened[0],
                imbalance=numbers.evened[1],
                **_of_experts(run, numbers, asked),
                elapsed_s=numbers.ended - started,
            )
            for writer in writers:
                writer.write(metrics)
            progress.step(metrics)
            if not numbers.is_finite and not is_warned:
                is_warned = True
                progress.warn(
                    f"step {metrics.step}: loss {metrics.loss}, grad_norm {metrics.grad_norm}: "
                    f"training has diverged. {REMEDIES} may help"
                )

    return hook


def _is_logged(run: Run, step: int) -> bool:
    is_edge = step in (run.first_step + 1, run.last_step)
    return is_edge or step % run.config.train.log_every == 0


def _of_experts(run: Run, numbers: StepNumbers, asked: _Asked) -> dict[str, Any]:
    """What the numbers of a step say of them."""
    loads, is_logged = _loads(run, numbers), _is_logged(run, numbers.step)
    return {
        "tokens_per_expert": loads if is_logged and loads else None,
        "expert_visits": asked.visits if is_logged else None,
        "expert_wait_s": asked.wait_s if is_logged else None,
        "expert_imbalance": max(map(_most_of_mean, loads.values()), default=None),
    }


def _loads(run: Run, numbers: StepNumbers) -> Mapping[str, list[int]]:
    """By layer of experts, how many choices went to each."""
    counts = run.built.executor.buffers.counts(numbers.added)
    return {name.split(".")[1]: each for name, each in counts.items()}


def _most_of_mean(load: Sequence[int]) -> float:
    return max(load) * len(load) / max(sum(load), 1)


class _Asked(NamedTuple):
    """What only a question to all ranks tells."""

    memory_gib: float = 0.0
    """Most that any rank has held."""
    visits: Mapping[str, list[int]] | None = None
    """As ``StepMetrics.expert_visits``."""
    wait_s: float | None = None


def _asked_all(run: Run, step: int, pace: Pace | None) -> _Asked:
    """On the way all tell what they have taken. Collective."""
    residents = run.built.residents
    told = None if residents is None else astuple(residents.told())
    mine = (run.platform.peak_memory_gib(), pace.taken() if pace else (), told)
    everyone = run.comm.gather_json(mine, name="peak memory")
    if pace is not None:
        pace.look(step, [taken for _, taken, _ in everyone])
    memory_gib = max(float(memory) for memory, _, _ in everyone)
    found: dict[str, list[int]] = {}
    waits = []
    for rank, (_, _, visits) in enumerate(everyone):
        if visits:
            tier = run.plan.rank_plan(rank).stage_plan.expert_tier
            *counts, waited = visits
            found[tier] = [a + b for a, b in zip(found.get(tier, [0, 0, 0]), counts, strict=True)]
            waits.append(float(waited))
    return _Asked(memory_gib, found or None, max(waits, default=None))


def evaluate_now_and_then(run: Run, evaluated: Callable[[int], Evaluation]) -> Hook:
    """Evaluate every ``train.eval_every`` steps, the last step apart: its result is the run's."""
    every = run.config.train.eval_every

    def hook(record: StepRecord) -> None:
        if every and record.step % every == 0 and record.step != run.last_step:
            evaluated(record.step)

    return hook


def evaluating(
    run: Run,
    data: Dataset,
    positions: np.ndarray,
    writers: Sequence[Writer],
    progress: Progress,
    *,
    written: Collection[int],
) -> Callable[[int], Evaluation]:
    """Evaluates after a step; rank 0 writes and shows what was found. Collective.

    ``written``: steps whose evaluation an earlier start has written, to be shown only. Where no
    text is held out nothing is found, and nothing told.
    """
    started = time.perf_counter()

    def evaluated(step: int) -> Evaluation:
        began = time.perf_counter()
        found = evaluate(run, data, positions)
        if not found.tokens:
            return found
        facts = {"seconds": time.perf_counter() - began, "loss": found.loss}
        run.events.write("evaluation", f"held-out loss {found.loss:.4f}", step=step, facts=facts)
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
        return found

    return evaluated


def save_now_and_then(run: Run, saver: Saver, progress: Progress) -> Hook:
    """Save every ``checkpoint.every`` steps, when the clock asks, at the end, and before a stop; in
    between copy into memory every ``checkpoint.snapshot_every`` steps.

    A save that fails in between is reported and training goes on; at the end it is an error. What
    is not finite does not take the place of what is, unless training is never to end for that.
    """
    every = run.config.checkpoint.every
    takes_all = not run.config.train.stop_after_non_finite

    def hook(record: StepRecord) -> None:
        saver.look()
        is_end = record.step == run.last_step or record.stops
        if not (is_end or record.saves or (every and record.step % every == 0)):
            snapshot_now_and_then(run, saver, record)
            return
        run.save_clock.restart()
        is_sound = _is_sound(run, record)
        if not (takes_all or is_sound):
            if is_end:
                saver.settle()
            said = f"no checkpoint at step {record.step}: its numbers are not finite"
            progress.warn(said)
            run.events.write("save_skipped", said, step=record.step)
            return
        try:
            (saver.save_last if is_end else saver.save)(record.step, finite=is_sound)
        except CheckpointError as error:
            said = f"no checkpoint at step {record.step}: {error}"
            run.events.write("save_failed", said, step=record.step)
            if is_end:
                raise
            progress.warn(said)

    return hook


def snapshot_now_and_then(run: Run, saver: Saver, record: StepRecord) -> None:
    """Copy into memory after a step that is not saved, if it is time and its numbers are finite."""
    every = run.config.checkpoint.snapshot_every
    takes_all = not run.config.train.stop_after_non_finite
    is_sound = _is_sound(run, record)
    if every and record.step % every == 0 and (takes_all or is_sound):
        saver.snapshot(record.step, finite=is_sound)


def _is_sound(run: Run, record: StepRecord) -> bool:
    """The numbers of a step are finite, as far as is known, or it changed nothing."""
    return record.is_finite or run.config.recovery.skips


def leave_when_wanted(run: Run, saver: Saver) -> Hook:
    """Leave the state of the step in memory, for the plan that goes on with it, and end the epoch.
    Where there is no place for it yet, another step is done."""

    def hook(record: StepRecord) -> None:
        is_end = record.step == run.last_step or record.stops
        if not record.moves or is_end:
            return
        if saver.keep(record.step, finite=_is_sound(run, record)):
            run.abort.left = True

    return hook

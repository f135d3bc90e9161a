"""The end of a run: what the model is worth, next to what counting words is worth."""

from __future__ import annotations

import json
import math
import platform as machine
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.checkpoint.reader import open_checkpoint
from weft.checkpoint.whole import load_model, saved_model
from weft.config.sections import SampleConfig
from weft.data.baselines import baselines
from weft.data.beginnings import beginnings
from weft.data.prepare import Prepared
from weft.data.tokenizer import Tokenizer
from weft.models.generate import Sampling, Writer, generate
from weft.models.registry import is_decoder
from weft.platform.detect import detect_node
from weft.report.events import EVENTS_FILE, read_events
from weft.report.goodput import goodput
from weft.report.metrics import StepMetrics, perplexity, read_metrics
from weft.report.page import write_report
from weft.resolve.peaks import Peak
from weft.resolve.prediction import beside, measured, median, steady
from weft.train.job import Job
from weft.train.loop import Evaluation, Run
from weft.train.run_folder import SUMMARY_FILE, write_text
from weft.version import __version__

COUNTED_TOKENS = 20_000_000
"""Training tokens that the baselines count at most."""
BEGINNINGS = 2
"""Of held-out text that a model continues at the end, where no prompts are given."""


def finish_run(
    run: Run,
    job: Job,
    data: Prepared,
    final: Evaluation,
    positions: np.ndarray,
    *,
    used: Sequence[Mapping[str, Any]],
    peak: Peak,
    wall_s: float,
) -> None:
    """Write ``summary.json`` and ``report.html``. On rank 0, after the last step.

    A run that diverged has a summary too: its numbers are null, and it has no samples. A family of
    stages that are no decoders has none either.
    ``used``: by rank, most memory so far (``memory_gib``), what it sent in a step (``sent_mb``) and
    what it waited for (``waits_s``).
    ``peak``: what MFU is measured against.
    """
    tokenizer = data.tokenizer()
    steps, _ = read_metrics(job.out / "metrics.jsonl")
    # Earlier starts may have had another plan; after the last step there are none but these.
    mine = [step for step in steps if step.step > run.first_step] or steps
    summary = {
        "step": run.last_step,
        "parameters": sum(spec.numel for spec in run.built.specs),
        "wall_s": wall_s,
        **_held_out(data, tokenizer, final, positions),
        "samples": _samples(job, data, tokenizer),
        "environment": environment(),
        "tokens_per_s": median([step.tokens_per_s for step in steady(mine)]),
        **_mfu(steady(mine), peak),
    }
    summary["waits"] = _waits(run, used, mine)
    spent = goodput(read_events(job.out / EVENTS_FILE), steps)
    summary["goodput"] = None if spent is None else spent.to_json()
    if job.prediction is not None:
        took = measured(
            mine,
            memory_gib=[rank["memory_gib"] for rank in used],
            sent_mb=sum(rank["sent_mb"] for rank in used),
        )
        summary["prediction"] = beside(job.prediction, took)
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(job.out / SUMMARY_FILE, text)
    if job.config.metrics.report:
        write_report(job.out)


def _samples(job: Job, data: Prepared, tokenizer: Tokenizer) -> list[dict[str, str]]:
    """What the model writes at the end, if it is one that writes."""
    checkpoint = open_checkpoint(job.checkpoints)
    if not is_decoder(saved_model(checkpoint)):
        return []
    model, wanted = load_model(checkpoint), job.config.sample
    if not is_finite(model):
        return []
    if wanted.prompts is None:
        found = beginnings(data.held_out.open(), tokenizer, BEGINNINGS)
        wanted = wanted.model_copy(update={"prompts": found})
    return write_samples(model, tokenizer, wanted, job.config.seed)


def _waits(
    run: Run, used: Sequence[Mapping[str, Any]], steps: Sequence[StepMetrics]
) -> list[dict[str, Any]]:
    """Where each rank that waits is, and for what it waits in a step of so many seconds: means of
    the same steps, so that no part is above the whole."""
    if not steps:
        return []
    step_s = fmean(step.step_time_s for step in steady(steps))
    found = []
    for rank, each in enumerate(used):
        mine = run.plan.rank_plan(rank)
        where = {"rank": rank, "pipeline": mine.pipeline, "stages": list(mine.stages)}
        if each["waits_s"]:
            found.append({**where, "step_s": step_s, "waits_s": each["waits_s"]})
    return found


def _mfu(steps: Sequence[StepMetrics], peak: Peak) -> dict[str, Any]:
    """Of both references, where there are both."""
    found: dict[str, Any] = {
        "mfu": median([step.mfu for step in steps if step.mfu is not None]),
        "mfu_reference": {"tflops": peak.flops and peak.flops / 1e12, "basis": peak.basis},
        "mfu_of_measured": None,
    }
    if peak.measured_flops is not None:
        mfu = median([mfu for step in steps if (mfu := step.mfu_of_measured) is not None])
        tflops, basis = peak.measured_flops / 1e12, peak.measured_basis
        found["mfu_of_measured"] = {"mfu": mfu, "tflops": tflops, "basis": basis}
    return found


def _held_out(
    data: Prepared, tokenizer: Tokenizer, final: Evaluation, positions: np.ndarray
) -> dict[str, Any]:
    """The final evaluation in three units, and what counting reaches on the same targets."""
    if not len(positions):
        return {"held_out": None, "baselines": {}}
    batch = data.held_out.open().batch(positions)
    num_bytes = sum(len(tokenizer.decode(row).encode()) for row in batch.targets)
    counted = baselines(
        data.train_stream(COUNTED_TOKENS),
        contexts=batch.tokens,
        targets=batch.targets,
        weights=batch.weights,
        vocab_size=data.vocab_size,
    )
    return {
        "held_out": {
            "loss": _number(final.loss),
            "perplexity": _number(perplexity(final.loss)),
            "bits_per_byte": _number(final.loss * final.tokens / math.log(2) / max(num_bytes, 1)),
            "tokens": final.tokens,
            "bytes": num_bytes,
        },
        "baselines": {"unigram": counted.unigram, "bigram": counted.bigram},
    }


def _number(value: float) -> float | None:
    """JSON has no infinities and no NaN."""
    return value if math.isfinite(value) else None


def is_finite(model: nn.Module) -> bool:
    """No weight of the model is infinite or NaN."""
    return all(bool(param.isfinite().all()) for param in model.parameters())


def write_samples(
    model: Writer, tokenizer: Tokenizer, config: SampleConfig, seed: int
) -> list[dict[str, str]]:
    """What the model writes after each prompt. All its weights must be finite.

    After an empty prompt it begins a document.
    """
    sampling = Sampling(
        max_new_tokens=config.tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        seed=seed,
        end_id=tokenizer.end_id,
    )
    written = []
    for prompt in config.prompts or ():
        start = prompt_tokens(tokenizer, prompt)
        tokens = generate(model, torch.from_numpy(start.astype(np.int64))[None], sampling)
        new = tokens[0, len(start) :]
        written.append({"prompt": prompt, "text": tokenizer.decode(new.cpu().numpy())})
    return written


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> np.ndarray:
    """Token ids ``[at least 1]`` of a prompt; where it is empty, those of a document's beginning.

    Documents follow each other in training, so an end is what stands before a beginning.
    """
    (start,) = tokenizer.encode_batch([prompt])
    return np.asarray(start) if len(start) else np.asarray([tokenizer.end_id])


def environment() -> dict[str, Any]:
    """Versions and the machine, as far as they can change a number."""
    node = asdict(detect_node())
    return {
        "weft": __version__,
        "torch": torch.__version__,
        "python": machine.python_version(),
        "system": machine.platform(),
        "processor": node["cpu"],
        "cores": node["cores"],
        "memory_gib": node["memory_gib"],
        "accelerators": [chip["name"] for chip in node["chips"]],
    }

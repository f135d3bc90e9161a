"""The end of a run: what the model is worth, next to what counting words is worth."""

from __future__ import annotations

import json
import math
import platform as machine
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import weft
from weft.data.baselines import baselines
from weft.data.prepare import Prepared
from weft.infer.generate import generate
from weft.train.evaluate import Evaluation, held_out_positions
from weft.train.job import Job
from weft.train.loop import Run
from weft.train.metrics import read_metrics
from weft.train.report import write_report

WARM_UP_STEPS = 2
"""Steps left out of a run's throughput: memory is allocated and code paths are met in them."""


def finish_run(run: Run, job: Job, data: Prepared, final: Evaluation, *, wall_s: float) -> None:
    """Write ``summary.json`` and ``report.html``. On rank 0, after the last step."""
    summary = {
        "step": run.last_step,
        "parameters": sum(spec.numel for spec in run.built.specs),
        "wall_s": wall_s,
        "held_out": _held_out(run, data, final),
        "baselines": _baselines(run, data),
        "samples": samples(run, data),
        "environment": environment(),
        **_speed(job.out),
    }
    (job.out / "summary.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False))
    if job.config.metrics.report:
        write_report(job.out)

"""Plans and run folders that tests of the report share."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.report.metrics import EvalMetrics, JsonlWriter, StepMetrics


def stage(ranks: range, layers: tuple[int, int], device: str = "cpu", **axes: int) -> StagePlan:
    return StagePlan(mesh=Mesh.of(ranks, **axes), layers=layers, device=device)


TWO_TO_ONE = Plan(
    num_layers=6,
    pipelines=(
        PipelinePlan(stages=(stage(range(1), (0, 6)),), samples=16, microbatch=4),
        PipelinePlan(stages=(stage(range(1, 2), (0, 6)),), samples=8, microbatch=4),
    ),
)
UNLIKE = Plan(
    num_layers=32,
    pipelines=(
        PipelinePlan(
            stages=(
                stage(range(8), (0, 22), "cuda", dp=4, tp=2),
                stage(range(8, 24), (22, 32), "npu", dp=2, tp=8),
            ),
            samples=96,
            microbatch=8,
        ),
        PipelinePlan(stages=(stage(range(24, 25), (0, 32), "npu"),), samples=32, microbatch=1),
    ),
)


def write_metrics(path: Path, steps: int, *, eval_every: int = 50) -> None:
    """A loss of 8 that falls to 4, with a number that is not finite at step 13."""
    writer = JsonlWriter(path, None)
    for step in range(1, steps + 1):
        writer.write(
            StepMetrics(
                step=step,
                loss=math.nan if step == 13 else 4 + 4 * 0.98**step,
                tokens=6144,
                grad_norm=1.0 + (step == 40) * 9,
                lr=1e-3,
                step_time_s=0.5,
                tokens_per_s=12288.0,
                memory_gib=0.5 + 0.001 * step,
                mfu=None,
                samples=24 * step,
                elapsed_s=0.5 * step,
            )
        )
        if step % eval_every == 0:
            loss = 4.5 + 4 * 0.98**step
            writer.write(EvalMetrics(step=step, eval_loss=loss, eval_tokens=99, elapsed_s=1.0))
    writer.close()


SUMMARY: dict[str, Any] = {
    "step": 120,
    "parameters": 6_500_000,
    "wall_s": 250.0,
    "tokens_per_s": 8123.0,
    "mfu": 0.314,
    "held_out": {
        "loss": 4.0,
        "perplexity": 54.598,
        "bits_per_byte": 2.0,
        "tokens": 1000,
        "bytes": 3000,
    },
    "baselines": {"unigram": 6.5, "bigram": 5.25},
    "samples": [{"prompt": "def main(", "text": "self):\n    pass\n\n"}],
    "environment": {"torch": "2.13.0", "threads": {"rank 0": 1}},
}
CONFIG = """
name: try
model: {family: llama, size: demo-5m}
optim: {lr: 0.003}
train: {steps: 120}
"""
ORIGINS = {
    "name": "by default",
    "model.family": "by default",
    "model.size": "at demo.yaml:3 (recipe)",
    "optim.lr": "on the command line",
    "train.steps": "at demo.yaml:22 (recipe)",
}
CLUSTER = {
    "nodes": [
        {"host": "box", "cpu": "EPYC", "cores": 2, "memory_gib": 23.5, "cpu_bf16": False}
        | {"chips": [], "problems": []}
    ]
}


def make_run(parent: Path) -> Path:
    """The folder of a finished run."""
    folder = parent / "try"
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "origins.json").write_text(json.dumps(ORIGINS))
    (folder / "plan.json").write_text(TWO_TO_ONE.to_json())
    (folder / "cluster.json").write_text(json.dumps(CLUSTER))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    write_metrics(folder / "metrics.jsonl", 120)
    return folder


def change_summary(run: Path, **changes: object) -> None:
    (run / "summary.json").write_text(json.dumps(SUMMARY | changes))

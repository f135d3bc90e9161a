"""Whole training jobs that take a second."""

import json
from pathlib import Path

from weft.cluster.cluster import Cluster, Node
from weft.config.load import load_config
from weft.resolve.resolve import resolve
from weft.train.job import Job

STEPS = 4
CHANGED_AT = 2
NARROW = ["model.d_model=64", "model.d_ff=128", "model.d_head=16"]
"""Layers half as wide as the recipe's."""
SMALL = [
    *NARROW,
    "batch.samples=4",
    "batch.micro=1",
    "data.seq_len=32",
    "data.workers=0",
    f"train.steps={STEPS}",
    *["train.eval_samples=4", "sample.prompts=[]", "metrics.report=false"],
]
LAPTOP = Node(
    host="laptop", cpu="some", cores=2, memory_gib=16, cpu_bf16=False, chips=(), problems=()
)
STAGES = "plan.stages=[{layers: 1}, {}]"
FIRST = [*SMALL, STAGES, "plan.schedule=gpipe"]
SECOND = [*SMALL, STAGES, "plan.schedule=1f1b"]
"""Another plan whose sums are added in the same order: not one bit may differ."""
OTHER = [*SMALL, "plan.shares=[2,2]"]
"""A plan with other groups; its sums are added in another order."""


def job(overrides: list[str], out: Path, last_step: int) -> Job:
    resolved = resolve(load_config("debug", overrides), Cluster(nodes=(LAPTOP,)))
    return Job(
        config=resolved.config,
        plan=resolved.plan,
        out=out,
        last_step=last_step,
        threads=1,
        console="quiet",
    )


def losses(out: Path) -> list[float]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]

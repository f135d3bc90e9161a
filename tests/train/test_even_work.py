"""Training with samples given out by work: the same steps, and less waiting for one rank."""

import json
import random
from pathlib import Path

import pytest
from train.small_jobs import NARROW, job
from train.test_balance import EVERY, at_speeds, rows
from train.test_life import live

from weft.cost.flops import pairs_of_a_token
from weft.data.even import evenly
from weft.data.prepare import prepare
from weft.elastic.pool import WorkerPool
from weft.models.registry import model_spec
from weft.planner.shares import with_shares
from weft.report.charts import charts
from weft.report.metrics import read_metrics
from weft.train.job import Job

PLAN = [
    "plan.pipelines=[{share: 2, stages: [{layers: 1, dp: 2, zero: 2}, {zero: 2}]}, "
    "{stages: [{cp: 2, zero: 2}]}]",
    "plan.domains=pipelines",
    "data.balance_documents=true",
    EVERY,
]


def asked(folder: Path) -> list[str]:
    """A text of documents of 5 to 500 bytes."""
    text, drawn = folder / "text.jsonl", random.Random(4)
    documents = ("to be or not " * 40 for _ in range(400))
    lines = [json.dumps({"text": each[: round(5 * 100 ** drawn.random())]}) for each in documents]
    text.write_text("\n".join(lines))
    return [
        *NARROW,
        f"data.path={text}",
        f"data.cache_dir={folder / 'cache'}",
        "data.tokenizer=bytes",
        "data.seq_len=64",
        "data.workers=0",
        "data.mask_documents=true",
        "batch.samples=12",
        "batch.micro=2",
        "compute.precision=fp64",
        "train.steps=8",
        "train.eval_samples=4",
        "sample.prompts=[]",
        "metrics.report=false",
        "checkpoint.every=3",
    ]


def expected_imbalance(asked: Job) -> list[float]:
    """Of eight steps, with the shares that were in force."""
    data = prepare(asked.config.data, asked.config.seed, report=lambda *_: None)
    spec = model_spec(asked.config.model, data.vocab_size, 64)
    found = []
    for step, shares in enumerate(((8, 4),) * 2 + ((6, 6),) * 2 + ((3, 9),) * 2 + ((8, 4),) * 2):
        even = evenly(data.train, with_shares(asked.plan, shares), pairs_of_a_token(spec))
        assert len(even.slots) == 2
        batch = even.open().batch([step * 12])
        assert batch.evened is not None
        found.append(float(batch.evened[1]))
    return found


def test_samples_given_out_by_work_are_the_same_step(tmp_path: Path, pool: WorkerPool) -> None:
    """As one rank does it in their order; with shares that change by speed, and stopped between."""
    plain, whole, parts = (tmp_path / name for name in ("plain", "whole", "parts"))
    given = asked(tmp_path)
    pool.run(live, [job([*given, "plan.shares=[1]"], plain, 8)], world_size=1)
    given += PLAN
    pool.run(at_speeds, [job(given, whole, 8)], world_size=5)
    steps, _ = read_metrics(plain / "metrics.jsonl")
    found, _ = read_metrics(whole / "metrics.jsonl")
    assert len(steps) == len(found) == 8
    for one, other in zip(steps, found, strict=True):
        assert (one.step, one.data) == (other.step, other.data)
        assert one.loss == pytest.approx(other.loss, rel=1e-10)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-10)
        assert one.imbalance is None
        assert other.imbalance is not None and other.imbalance_in_order is not None
        assert 1 <= other.imbalance <= other.imbalance_in_order
    assert sum(m.imbalance or 0 for m in found) < sum(m.imbalance_in_order or 0 for m in found)
    assert [m.imbalance for m in found] == expected_imbalance(job(given, whole, 8))
    assert [chart.id for chart in charts(found, [], {})].count("work") == 1
    assert "work" not in [chart.id for chart in charts(steps, [], {})]

    pool.run(at_speeds, [job(given, parts, 5), job(given, parts, 8)], world_size=5)
    losses = [[row["loss"] for row in rows(out) if "loss" in row] for out in (whole, parts)]
    assert losses[0] == losses[1], "not one bit differs after a stop"

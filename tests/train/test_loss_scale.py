"""The loss scale of half precision: found overflow agrees on all ranks and stages, in any split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from weft.comm.address import RankAddress
from weft.config.optim_sections import AdamWConfig, OptimConfig, SgdConfig
from weft.diagnose.verdict import TOLERANCE
from weft.diagnose.verify import (
    COARSE_EPS,
    Rehearsal,
    difference,
    one_process,
    rehearse,
    rehearsing,
    synthetic_microbatches,
)
from weft.elastic.pool import WorkerPool
from weft.models.llama.sizes import SIZES
from weft.optim.adafactor.config import AdafactorConfig
from weft.optim.muon.config import MuonConfig
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.train.assemble import fill, initial
from weft.train.loss_scale import CLEAN_STEPS, FIRST, LARGEST, LossScale

SPEC = replace(SIZES["debug-1m"].reduced(), num_layers=2)


def stage(ranks: tuple[int, ...], layers: tuple[int, int], **settings: Any) -> StagePlan:
    axes = {axis: settings.pop(axis) for axis in ("dp", "tp") if axis in settings}
    asked = {"precision": "fp16", **settings}
    return StagePlan(mesh=Mesh.of(ranks, **axes), layers=layers, **asked)


def plan(*stages: StagePlan, schedule: str = "1f1b") -> Plan:
    pipeline = PipelinePlan(stages=stages, samples=4, microbatch=2, schedule=schedule)
    return Plan(num_layers=2, pipelines=(pipeline,))


PLANS = {
    "zero 2": plan(stage((0, 1), (0, 2), dp=2, zero=2)),
    "tp 2, then one rank": plan(stage((0, 1), (0, 1), tp=2), stage((2,), (1, 2))),
    "halves of backward": plan(stage((0,), (0, 1)), stage((1,), (1, 2)), schedule="zb-h1"),
    "a stage in bf16": plan(stage((0,), (0, 1)), stage((1,), (1, 2), precision="bf16")),
}


def rehearsal(optim: OptimConfig) -> Rehearsal:
    return Rehearsal(spec=SPEC, optim=optim.rehearsed(COARSE_EPS), seq_len=16, seed=1, steps=3)


def test_the_scale_follows_what_gradients_bear() -> None:
    scale = LossScale(torch.device("cpu"))
    yes, no = torch.tensor(True), torch.tensor(False)
    assert scale.state() == {"value": FIRST, "clean_steps": 0.0}
    assert bool(scale.settle(no)) and float(scale.value) == FIRST / 2
    for _ in range(CLEAN_STEPS):
        assert not bool(scale.settle(yes))
    assert scale.state() == {"value": FIRST, "clean_steps": 0.0}
    scale.restore(LARGEST, CLEAN_STEPS - 1)
    scale.settle(yes)
    assert float(scale.value) == LARGEST
    scale.restore(1.0, 5)
    assert not bool(scale.settle(no)), "no smaller scale can help"
    assert scale.state() == {"value": 1.0, "clean_steps": 0.0}


@pytest.mark.parametrize("name", ["zero 2", "tp 2, then one rank", "halves of backward"])
def test_a_split_changes_nothing_that_rounding_does_not_explain(
    pool: WorkerPool, name: str
) -> None:
    job = rehearsal(AdamWConfig(lr=0.01))
    split, alone = (
        rehearse(pool.run, each, job) for each in (PLANS[name], one_process(PLANS[name]))
    )
    found = difference(alone, split)
    assert 0 < found.largest < TOLERANCE["float16"], found
    assert all(np.isfinite(split.grad_norms))


def overflowing(address: RankAddress, plan: Plan, job: Rehearsal) -> dict[str, Any]:
    """Two steps with a scale that is far too large, then one with a good one."""
    with rehearsing(address, plan, job) as (comm, built):
        fill(built.gradients, initial(job.seed))
        built.optimizer.lr = 0.01
        scale = built.engine.loss_scale
        assert scale is not None
        told = []
        for step, value in enumerate((2.0**60, 2.0**60, 2.0**10)):
            scale.restore(value, 0)
            before = [main.value.clone() for main in built.gradients.mains]
            result = built.engine.step(synthetic_microbatches(comm, plan, job, step))
            pairs = zip(before, built.gradients.mains, strict=True)
            unchanged = all(torch.equal(old, main.value) for old, main in pairs)
            assert result.skipped is not None
            told.append((bool(result.skipped), float(scale.value), unchanged))
        states = [
            t for main in built.gradients.mains for _, t in built.optimizer.owned(main).values()
        ]
        finite = all(bool(t.isfinite().all()) for t in states)
        return {"told": told, "updates": built.optimizer.num_updates, "finite": finite}


@pytest.mark.parametrize(
    ("name", "optim"),
    [
        ("zero 2", AdamWConfig()),
        ("zero 2", SgdConfig(momentum=0.9)),
        ("zero 2", MuonConfig()),
        ("zero 2", AdafactorConfig()),
        *((name, AdamWConfig()) for name in PLANS if name != "zero 2"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.kind,
)
def test_overflow_anywhere_skips_the_step_everywhere(
    pool: WorkerPool, name: str, optim: OptimConfig
) -> None:
    asked = PLANS[name]
    ranks = pool.run(overflowing, asked, rehearsal(optim), world_size=asked.world_size)
    for rank in ranks:
        assert rank["told"] == [
            (True, 2.0**59, True),
            (True, 2.0**59, True),
            (False, 2.0**10, False),
        ]
        assert (rank["updates"], rank["finite"]) == (1, True)

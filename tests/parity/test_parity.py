"""Every way of splitting gives the one-process numbers: fp64, random weights, three steps."""

from dataclasses import dataclass, replace

import pytest

from weft.config.sections import CosineSchedule, OptimConfig
from weft.elastic.pool import WorkerPool
from weft.models.registry import FAMILIES
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, Recompute, StagePlan
from weft.train.verify import (
    REHEARSAL_EPS,
    Rehearsal,
    Trace,
    difference,
    one_process,
    rehearse,
    small,
)

TOLERANCE = 1e-10
"""fp64 rounding is 1e-16; sums over a few thousand terms and Adam's division leave 1e-12."""

OPTIM = OptimConfig(
    lr=0.01, eps=REHEARSAL_EPS, max_grad_norm=0.5, schedule=CosineSchedule(warmup=0)
)


@dataclass(frozen=True)
class Case:
    """A plan of single-stage pipelines."""

    name: str
    shares: tuple[int, ...]
    microbatch: int = 2
    dp: tuple[int, ...] = ()
    """Ranks of each pipeline; all 1 by default."""
    recompute: Recompute = "off"
    family: str = "llama"
    tied: bool = False
    dropout: float = 0.0

    def plan(self) -> Plan:
        pipelines, first = [], 0
        for share, dp in zip(self.shares, self.dp or (1,) * len(self.shares), strict=True):
            stage = StagePlan(
                mesh=Mesh.of(range(first, first + dp), dp=dp),
                layers=(0, 2),
                precision="fp64",
                recompute=self.recompute,
            )
            pipelines.append(
                PipelinePlan(stages=(stage,), samples=share, microbatch=self.microbatch)
            )
            first += dp
        return Plan(num_layers=2, pipelines=tuple(pipelines))

    def rehearsal(self) -> Rehearsal:
        family = FAMILIES[self.family]
        spec = small(next(iter(family.sizes.values())))
        spec = replace(spec, num_layers=2, dropout=self.dropout)
        if self.family == "llama":
            spec = replace(spec, tied=self.tied)
        return Rehearsal(spec=spec, optim=OPTIM, seq_len=16, seed=5)


PARITY = [
    Case("accumulation", shares=(6,), microbatch=2),
    Case("microbatch-1", shares=(6,), microbatch=1),
    Case("ragged-microbatch", shares=(6,), microbatch=4),
    Case("recompute", shares=(6,), microbatch=6, recompute="full"),
    Case("pipelines-equal", shares=(3, 3)),
    Case("pipelines-2-1", shares=(4, 2)),
    Case("pipelines-3-1-2", shares=(3, 1, 2), microbatch=1),
    Case("mesh-dp2", shares=(6,), dp=(2,)),
    Case("mesh-dp2-odd-microbatch", shares=(6,), dp=(2,), microbatch=3),
    Case("mesh-dp4-idle-rank", shares=(6,), dp=(4,), microbatch=3),
    Case("unlike-pipelines", shares=(4, 2), dp=(2, 1)),
    Case("tied", shares=(4, 2), tied=True),
    Case("gpt2", shares=(4, 2), family="gpt2"),
    Case("gpt2-dropout", shares=(4, 2), family="gpt2", dropout=0.3),
]


@pytest.fixture(scope="session")
def alone(pool: WorkerPool) -> dict[Rehearsal, Trace]:
    """Traces of one process, filled on demand."""
    return {}


@pytest.mark.parametrize("case", PARITY, ids=lambda case: case.name)
def test_matches_one_process(case: Case, pool: WorkerPool, alone: dict[Rehearsal, Trace]) -> None:
    rehearsal, plan = case.rehearsal(), case.plan()
    if rehearsal not in alone:
        alone[rehearsal] = rehearse(pool.run, one_process(plan), rehearsal)
    reference = alone[rehearsal]
    assert len(set(reference.losses)) == rehearsal.steps, "the losses never changed"
    result = difference(reference, rehearse(pool.run, plan, rehearsal))
    assert result.largest < TOLERANCE, result

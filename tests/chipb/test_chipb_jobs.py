"""Jobs whose ranks are processors and chips of another type: the numbers of one process."""

from dataclasses import replace

import pytest
from chipb.chip import with_chips
from parity.cases import STEPS, Case

from weft.diagnose.verify import Rehearsal, Trace, difference, one_process, rehearse
from weft.elastic.pool import WorkerPool
from weft.plan.plan import Plan

TOLERANCE = 1e-10
"""As in the parity table: the families compute in other orders, both in fp64."""

MIXED = [
    (Case("pp2", shares=(6,), dp=((1, 1),), layers=((2, 2),)), "cpu chipb"),
    (Case("pp2-from-chip", shares=(6,), dp=((1, 1),), layers=((1, 3),)), "chipb cpu"),
    (Case("pp2-tied", shares=(6,), dp=((1, 1),), layers=((3, 1),), tied=True), "cpu chipb"),
    (
        Case("pp3-there-and-back", shares=(6,), dp=((1, 1, 1),), layers=((1, 2, 1),)),
        "cpu chipb cpu",
    ),
    (Case("pipelines-2-1", shares=(4, 2)), "cpu | chipb"),
    (Case("pipelines-3-3-gpt2", shares=(3, 3), family="gpt2", dropout=0.2), "chipb | cpu"),
    (Case("dp2-beside-dp2", shares=(4, 2), dp=((2,), (2,))), "cpu | chipb"),
    (
        Case("border-dp2-dp1-tied", shares=(6,), dp=((2, 1),), layers=((2, 2),), tied=True),
        "cpu chipb",
    ),
    (
        Case("tp2-inside-each", shares=(6,), dp=((1, 1),), tp=((2, 2),), layers=((2, 2),)),
        "cpu chipb",
    ),
    (Case("tp2-beside-tp1", shares=(4, 2), dp=((1,), (1,)), tp=((1,), (2,))), "cpu | chipb"),
    (Case("domains-zero3", shares=(4, 2), dp=((2,), (1,)), zero=3, tied=True,
          domains=((0, 1), (2,))), "chipb | cpu"),
    (Case("domains", shares=(4, 2), dp=((2,), (2,)), domains=((2, 3), (0, 1))), "cpu | chipb"),
    (Case("zero1-across", shares=(4, 2), zero=1), "cpu | chipb"),
    (Case("zero1-a-host-keeps", shares=(6, 0), dp=((2,), (1,)), zero=1, tied=True,
          state_shares=((0, 0), (1,))), "chipb | cpu"),
    (Case("zero2-across-tied", shares=(4, 2), dp=((2,), (1,)), zero=2, tied=True), "cpu | chipb"),
    (
        Case("zero3-on-chips", shares=(6,), dp=((1, 2),), layers=((1, 3),), zeros=(0, 3)),
        "cpu chipb",
    ),
    (Case("chips-alone", shares=(6,), dp=((2,),), zero=3, recompute="full"), "chipb"),
    (
        Case("zb-v-tied", shares=(6,), dp=((1, 1),), layers=((1, 1, 1, 1),), schedule="zb-v",
             tied=True, recompute="full"),
        "cpu chipb",
    ),
    (
        Case("unlike-pipelines", shares=(4, 2), dp=((1, 1), (1,)), layers=((1, 3), (4,)), tied=True,
             passes=2),
        "cpu chipb | chipb",
    ),
]  # fmt: skip


def on(plan: Plan, families: str) -> Plan:
    """The same plan on other devices: a word for each mesh, pipelines apart by ``|``."""
    pipelines = []
    for pipeline, words in zip(plan.pipelines, families.split("|"), strict=True):
        stages = list(pipeline.stages)
        for numbers, device in zip(pipeline.positions(), words.split(), strict=True):
            for number in numbers:
                stages[number] = replace(stages[number], device=device)
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    return replace(plan, pipelines=tuple(pipelines))


@pytest.fixture(scope="module")
def alone() -> dict[tuple[Rehearsal, int], Trace]:
    """Traces of one processor, filled on demand."""
    return {}


@pytest.mark.parametrize(("case", "families"), MIXED, ids=lambda value: getattr(value, "name", ""))
def test_matches_one_processor(
    case: Case, families: str, chips: WorkerPool, alone: dict[tuple[Rehearsal, int], Trace]
) -> None:
    def run(job: object, *args: object, world_size: int) -> list:
        return chips.run(with_chips, job, *args, world_size=world_size)

    plan, rehearsal = case.plan(), replace(case.rehearsal(), steps=STEPS)
    key = (rehearsal, plan.global_batch)
    if key not in alone:
        alone[key] = rehearse(run, one_process(plan), rehearsal)
    reference = alone[key]
    assert len(set(reference.losses)) == rehearsal.steps, "the losses never changed"
    result = difference(reference, rehearse(run, on(plan, families), rehearsal))
    assert result.largest < TOLERANCE, result

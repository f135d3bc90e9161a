"""Two families of devices in one job: the same numbers, to the last bit, as one family's."""

from dataclasses import replace

import numpy as np
import pytest
from parity.cases import STEPS, Case

from weft.comm.address import RankAddress
from weft.diagnose.verify import Rehearsal, Trace, run_rank
from weft.elastic.pool import WorkerPool
from weft.plan.plan import Plan
from weft.platform.cpu import CpuPlatform
from weft.platform.registry import PLATFORMS


class OtherPlatform(CpuPlatform):
    """Processors that have no library of collectives in common with others."""

    name = "other"
    collective_backend = "none"


def with_another_family(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> Trace:
    PLATFORMS.add(OtherPlatform())
    try:
        return run_rank(address, plan, rehearsal)
    finally:
        PLATFORMS.remove(OtherPlatform.name)


def mixed(plan: Plan) -> Plan:
    """The same plan, with the last mesh of every pipeline on devices of the other family."""
    pipelines = []
    for pipeline in plan.pipelines:
        last = pipeline.positions()[-1]
        stages = tuple(
            replace(stage, device="other") if number in last else stage
            for number, stage in enumerate(pipeline.stages)
        )
        pipelines.append(replace(pipeline, stages=stages))
    return replace(plan, pipelines=tuple(pipelines))


CASES = [
    Case("pp2", shares=(6,), dp=((1, 1),), layers=((3, 1),)),
    Case("tp2-inside-each", shares=(6,), dp=((1, 1),), tp=((2, 2),), layers=((2, 2),)),
    Case("border-dp2-dp1-tied", shares=(6,), dp=((2, 1),), layers=((2, 2),), tied=True),
    Case("unlike-pipelines", shares=(4, 2), dp=((1, 1), (1,)), layers=((1, 3), (4,))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_families_give_the_bits_of_one(case: Case, pool: WorkerPool) -> None:
    plan, rehearsal = case.plan(), replace(case.rehearsal(), steps=STEPS)
    one = pool.run(run_rank, plan, rehearsal, world_size=plan.world_size)
    two = pool.run(with_another_family, mixed(plan), rehearsal, world_size=plan.world_size)
    for expected, found in zip(one, two, strict=True):
        assert found.losses == expected.losses
        assert found.grad_norms == expected.grad_norms
        for ours, theirs in ((found.grads, expected.grads), (found.params, expected.params)):
            assert ours.keys() == theirs.keys()
            for name, value in ours.items():
                assert np.array_equal(value, theirs[name], equal_nan=True), name

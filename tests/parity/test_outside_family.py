"""A family that is no decoder trains under every kind of plan, as in one process."""

from importlib import import_module

import pytest
from families.encoder.sizes import SIZES
from parity.cases import OPTIM, Case

from weft.comm.address import RankAddress
from weft.diagnose.verify import Rehearsal, Trace, difference, one_process, rehearse, run_rank
from weft.elastic.pool import WorkerPool
from weft.models.registry import FAMILIES
from weft.plan.plan import Plan

REHEARSAL = Rehearsal(spec=SIZES["tiny"], optim=OPTIM, seq_len=16, seed=5)
CASES = [
    Case("dp2", shares=(6,), dp=((2,),), microbatch=3),
    Case("pp2", shares=(6,), dp=((1, 1),), layers=((1, 3),)),
    Case("pp2-zb-h1-recompute", shares=(6,), dp=((1, 1),), layers=((2, 2),), schedule="zb-h1",
         recompute="full"),
    Case("tp2", shares=(6,), dp=((1,),), tp=((2,),)),
    Case("zero3", shares=(6,), dp=((2,),), zero=3, passes=2),
    Case("dp2-tp2-pp2", shares=(6,), dp=((1, 2),), tp=((2, 1),), layers=((2, 2),), microbatch=3),
    Case("pipelines", shares=(4, 2), dp=((2,), (1,)), zero=1),
]  # fmt: skip


def run_encoder(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> Trace:
    """One rank, in a process that may not know the family yet."""
    if rehearsal.spec.family not in FAMILIES:
        import_module("families.encoder.family")
    return run_rank(address, plan, rehearsal)


class Ranks:
    """Runs the same in processes that know the family."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool

    def __call__(self, _job, *args, world_size):
        return self.pool.run(run_encoder, *args, world_size=world_size)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_encoder_that_classifies(case: Case, pool: WorkerPool) -> None:
    plan = case.plan()
    reference = rehearse(Ranks(pool), one_process(plan), REHEARSAL)
    assert len(set(reference.losses)) == REHEARSAL.steps
    found = difference(reference, rehearse(Ranks(pool), plan, REHEARSAL))
    assert found.largest < 1e-10, found

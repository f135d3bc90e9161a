"""A family that is no decoder trains under every kind of plan, as in one process."""

from dataclasses import replace
from importlib import import_module

import pytest
from families.encoder.layout import layout
from families.encoder.sizes import SIZES
from parity.cases import OPTIM, Case

from weft.axes.check import check_layout
from weft.axes.registry import AXES
from weft.comm.address import RankAddress
from weft.config.errors import ConfigError
from weft.diagnose.verify import Rehearsal, Trace, difference, one_process, rehearse, run_rank
from weft.elastic.pool import WorkerPool
from weft.models.registry import FAMILIES
from weft.plan.plan import Plan

REHEARSAL = Rehearsal(spec=SIZES["tiny"], optim=OPTIM, seq_len=16, seed=5)
ALL_SEEN = replace(REHEARSAL, spec=SIZES["all-seen"])
PACKED = replace(REHEARSAL, spec=SIZES["packed"], steps=2)
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
LONG = [
    Case("cp8-zero1", shares=(2,), dp=((1,),), cp=((8,),), zero=1),
    Case("cp2-tp2", shares=(6,), dp=((1,),), cp=((2,),), tp=((2,),), recompute="full"),
    Case("heads4-border-cp4-cp2", shares=(6,), dp=((1, 1),), cp=((4, 2),), head_ways=4,
         layers=((3, 1),)),
    Case("rows-heads2-cp4-zero3", shares=(6,), dp=((1,),), cp=((4,),), head_ways=2, scores="rows",
         zero=3),
    Case("border-cp2-cp4-zero3", shares=(6,), dp=((1, 1),), cp=((2, 4),), layers=((1, 3),), zero=3),
    Case("heads2-cp4-beside-cp2-tp2-zero2", shares=(4, 2), dp=((1,), (1,)), cp=((4,), (2,)),
         tp=((1,), (2,)), head_ways=2, zero=2),
    Case("rows-cp2-tp2-beside-cp4", shares=(4, 2), dp=((1,), (1,)), cp=((2,), (4,)),
         tp=((2,), (1,)), scores="rows", zero=1),
]  # fmt: skip
"""Of an encoder whose tokens ranks divide."""
DOCUMENTS = [
    Case("cp2-tp2-pp2-zero1", shares=(3,), dp=((1, 1),), cp=((2, 2),), tp=((2, 2),),
         layers=((1, 3),), zero=1),
    Case("cp4-pp2-zero2-by-work", shares=(3,), dp=((1, 1),), cp=((4, 4),), layers=((2, 2),), zero=2,
         schedule="zb-h1", by_work=True),
    Case("heads2-cp2-tp2-pp2-zero3-by-work", shares=(3,), dp=((1, 1),), cp=((2, 2),),
         tp=((2, 2),), layers=((2, 2),), head_ways=2, zero=3, by_work=True),
    Case("heads4-cp4-zero1", shares=(3,), dp=((1,),), cp=((4,),), head_ways=4, zero=1),
    Case("heads2-cp4-tp2-zero3", shares=(3,), dp=((1,),), cp=((4,),), tp=((2,),), head_ways=2,
         zero=3),
    Case("heads2-cp4-pp2-zero1-by-work", shares=(3,), dp=((1, 1),), cp=((4, 4),), layers=((3, 1),),
         head_ways=2, zero=1, by_work=True),
    Case("rows-cp2-tp2-pp2-zero2", shares=(3,), dp=((1, 1),), cp=((2, 2),), tp=((2, 2),),
         layers=((2, 2),), scores="rows", zero=2, by_work=True),
    Case("rows-cp8", shares=(1,), dp=((1,),), cp=((8,),), scores="rows"),
]  # fmt: skip
"""Likewise, of packed documents."""


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
    same_as_one_process(case, REHEARSAL, pool)


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_one_that_looks_both_ways_over_divided_samples(case: Case, pool: WorkerPool) -> None:
    same_as_one_process(case, ALL_SEEN, pool)


@pytest.mark.parametrize("case", DOCUMENTS, ids=lambda case: case.name)
def test_one_that_looks_both_ways_inside_documents(case: Case, pool: WorkerPool) -> None:
    same_as_one_process(case, PACKED, pool)


def same_as_one_process(case: Case, rehearsal: Rehearsal, pool: WorkerPool) -> None:
    plan = case.plan()
    reference = rehearse(Ranks(pool), one_process(plan), rehearsal)
    assert len(set(reference.losses)) == rehearsal.steps
    divided = replace(rehearsal, by_work=case.by_work)
    found = difference(reference, rehearse(Ranks(pool), plan, divided))
    assert found.largest < 1e-10, found


def test_a_mask_of_its_own_is_no_range_of_places() -> None:
    """Tokens that are hidden lie anywhere: ranks that divide samples do not know that module."""
    check_layout(layout(SIZES["all-seen"]), AXES["cp"])
    words = r"attn = 'Masked': expected a kind with a split form: .* divide heads or layers"
    with pytest.raises(ConfigError, match=words):
        check_layout(layout(SIZES["tiny"]), AXES["cp"])

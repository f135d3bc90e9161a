"""Ranks enter the reductions of all their groups in one order of the whole job."""

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from parity.cases import PARITY, Case

from weft.comm.address import RankAddress
from weft.diagnose.verify import Rehearsal, synthetic_microbatches
from weft.elastic.pool import WorkerPool
from weft.models.registry import FAMILIES
from weft.parallel.buckets import BUCKET_BYTES, Bucket, fill_buckets
from weft.parallel.gradients import reduction_order
from weft.parallel.params import held_pieces, param_tilings
from weft.plan.plan import Plan
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan

Call = tuple[tuple[int, ...], tuple[tuple[str, str], ...], int]
"""Ranks, pieces, and the round."""
CASES = [case for case in PARITY if case.plan().world_size > 1]
RUN = ("unlike-stages", "pipelines-3-1-unlike-stages", "pp2-zb-v", "border-tp4-tp2")


def call(bucket: Bucket, round_: int, rank: int) -> Call:
    """What a rank calls among those of its domain."""
    pieces = tuple((each.held.spec.name, str(each.held.box)) for each in bucket.entries)
    return bucket.near(rank), pieces, round_


def planned(case: Case, bucket_bytes: int) -> dict[int, list[Call]]:
    """What each rank calls in a step, by the plan alone."""
    plan, spec = case.plan(), case.rehearsal().spec
    specs = FAMILIES[spec.family].param_specs(spec)
    pieces = held_pieces(plan, specs, param_tilings(plan, spec))
    every = [held for cut in pieces.values() for held in cut if len(held.ranks) > 1]
    found = {}
    for rank in range(plan.world_size):
        rounds = plan.rank_plan(rank).pipeline_plan.num_microbatches
        buckets = fill_buckets([h for h in every if rank in h.ranks], 4, bucket_bytes)
        each = [(bucket, rounds if bucket.reduces_each_backward else 1) for bucket in buckets]
        order = reduction_order(each, list(pieces))
        made = (call(buckets[number], round_, rank) for number, round_ in order)
        found[rank] = [each for each in made if len(each[0]) > 1]
    return found


def agree(calls: Mapping[int, Sequence[Call]]) -> None:
    """All of them fit into one order, and each is made once by every rank of its group."""
    after: TopologicalSorter[Call] = TopologicalSorter()
    for each in calls.values():
        assert len(set(each)) == len(each)
        for before, then in pairwise(each):
            after.add(then, before)
    after.prepare()
    for rank, each in calls.items():
        for ranks, pieces, round_ in each:
            assert rank in ranks
            assert all((ranks, pieces, round_) in calls[other] for other in ranks)


@pytest.mark.parametrize("bucket_bytes", [1, BUCKET_BYTES], ids=["small", "large"])
def test_every_plan_has_one_order(bucket_bytes: int) -> None:
    """Of the parity table: unlike pipelines, V schedules, tied tables, ZeRO, ranks that idle."""
    several = shared = 0
    for case in CASES:
        calls = planned(case, bucket_bytes)
        agree(calls)
        several += any(len({ranks for ranks, _, _ in each}) > 1 for each in calls.values())
        stages = {rank: case.plan().rank_plan(rank).stages for rank in calls}
        for each in calls.values() if case.tied else ():
            is_shared = [
                pieces[0][0] == "embed.weight" and len({tuple(stages[r]) for r in ranks}) > 1
                for ranks, pieces, _ in each
            ]
            shared += any(is_shared)
            assert is_shared == sorted(is_shared), "what two stages share goes after all others"
    assert shared >= 4, "ranks that share a table with another stage"
    assert several >= 10, "plans in which a rank is in several groups"


def test_a_circle_is_seen() -> None:
    a, b = ((0, 1), ("x",), 0), ((0, 1, 2), ("y",), 0)
    agree({0: [a, b], 1: [a, b], 2: [b]})
    with pytest.raises(CycleError):
        agree({0: [a, b], 1: [b, a], 2: [b]})


def made(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> list[Call]:
    """What a rank really calls in a step."""
    comm, _ = join_plan(address, plan, timeout_s=600)
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    fill(built.gradients, initial(rehearsal.seed))
    found: list[Call] = []
    for sums in built.gradients._sums:

        def reduce(sums=sums, inner=sums.reduce):  # type: ignore[no-untyped-def]
            found.append(call(sums.bucket, sums._num_reduced, address.rank))
            return inner()

        sums.reduce = reduce  # type: ignore[method-assign]
    built.engine.step(synthetic_microbatches(comm, plan, rehearsal, 0))
    comm.close()
    return [each for each in found if len(each[0]) > 1]


@pytest.mark.parametrize("case", [c for c in CASES if c.name in RUN], ids=lambda case: case.name)
def test_a_step_keeps_it(case: Case, pool: WorkerPool) -> None:
    plan = case.plan()
    found = pool.run(made, plan, case.rehearsal(), world_size=plan.world_size)
    agree(dict(enumerate(found)))
    assert found == list(planned(case, BUCKET_BYTES).values())

"""What an exchange of tokens sends, by step of their way: to the byte and message by formula."""

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import pytest
from parity.cases import NUM_LAYERS, Case
from planner.test_in_flight import H100

from benchmarks.every_plan import pool as chips
from weft.cluster.view import ClusterView
from weft.comm.address import RankAddress
from weft.comm.counters import Count
from weft.comm.members import Link
from weft.cost.sent import Way, sent_by_plan
from weft.diagnose.verify import Rehearsal, synthetic_microbatches
from weft.elastic.pool import WorkerPool
from weft.parallel.ep.exchange import COUNTS, TOKENS
from weft.plan.model import ExpertsSpec
from weft.plan.plan import Plan, ZeroLevel
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan

NODES, EACH = 2, 2
COUNT = 5
"""Experts: not as many on each rank. All of them are chosen by every token, so nothing is left to
chance, and a rank's choices are exactly as many for each."""
CASE = Case(
    "counted",
    shares=(8,),
    microbatch=4,
    dp=((1,),),
    ep=((NODES * EACH,),),
    recompute="full",
    experts=ExpertsSpec(count=COUNT, top_k=COUNT),
)
FORWARDS = 2 * NUM_LAYERS * 2
"""Of layers in a step: micro-batches, and once more in backward."""


class Expected(NamedTuple):
    """Messages that a rank sends of each of these, by hand."""

    near: int
    across: int


def counted(
    address: RankAddress,
    plan: Plan,
    rehearsal: Rehearsal,
    names: Collection[str] = (COUNTS, TOKENS),
) -> dict[tuple[str, Link], Count]:
    """Of one step, of ranks that say they are on two machines."""
    comm, _ = join_plan(address, plan)
    places = range(comm.world_size)
    comm.members = [replace(comm.members[rank], node=f"{rank // EACH}") for rank in places]
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    fill(built.gradients, initial(rehearsal.seed))
    comm.counters.take()
    built.engine.step(synthetic_microbatches(comm, plan, rehearsal, 0))
    found = comm.counters.take()
    comm.close()
    return {key: count for key, count in found.items() if key[0] in names}


@pytest.mark.parametrize(
    ("ways", "pieces", "cast", "expected"),
    [
        (0, 1, "", Expected(near=EACH - 1, across=NODES - 1)),
        (0, 2, "fp8", Expected(near=EACH - 1, across=NODES - 1)),
        (1, 1, "", Expected(near=0, across=NODES * EACH - 1)),
    ],
    ids=["two steps", "two steps, pieces, between nodes in eight bits", "at once"],
)
def test_bytes_and_messages_are_those_of_the_formula(
    ways: int, pieces: int, cast: str, expected: Expected, pool: WorkerPool
) -> None:
    plan = replace(CASE, expert_ways=ways, expert_pieces=pieces).plan()
    between = "nodes" if cast else ""
    plan = plan.each(lambda s: replace(s, expert_cast=cast, expert_cast_between=between))
    rehearsal = CASE.rehearsal()
    ranks = pool.run(counted, plan, rehearsal, world_size=plan.world_size)
    view = ClusterView((chips(H100, 80, EACH, nodes=NODES, gbit=100),))
    sent = sent_by_plan(plan, rehearsal.spec, view, seq_len=rehearsal.seq_len)
    experts = {way: size for way, size in sent.items() if way.name in (COUNTS, TOKENS)}
    links: dict[Way, Link] = {way: "node" if way.reach == "node" else "across" for way in experts}
    found = {way: sum(rank[way.name, link].bytes for rank in ranks) for way, link in links.items()}
    assert found == pytest.approx(experts, rel=1e-12)
    assert {(way.name, link) for way, link in links.items()} == {*ranks[0]}
    trips = pieces * (2 * FORWARDS + FORWARDS)  # there and back, and gradients once
    for rank in ranks:
        for link, others in (("node", expected.near), ("across", expected.across)):
            if others:
                assert rank[TOKENS, link].messages == others * trips
                assert rank[COUNTS, link].messages == others * FORWARDS


def test_two_steps_send_far_as_much_in_each_message_as_neighbours_have() -> None:
    """By hand: of a rank's choices half leave their place, and half their machine; at once three in
    four leave their rank, in three messages of a quarter each."""
    plan, rehearsal = CASE.plan(), CASE.rehearsal()
    view = ClusterView((chips(H100, 80, EACH, nodes=NODES, gbit=100),))
    flat = plan.each(lambda stage: replace(stage, expert_ways=1))
    both, once = (
        sent_by_plan(each, rehearsal.spec, view, seq_len=rehearsal.seq_len) for each in (plan, flat)
    )
    d_model = rehearsal.spec.d_model
    step = 8 * rehearsal.seq_len * COUNT * 8 * d_model * NUM_LAYERS * (2 + 2 + 2)
    assert both[Way("experts", "node")] == both[Way("experts", "across")] == step / 2
    assert once[Way("experts", "across")] == step * 3 / 4 and Way("experts", "node") not in once
    a_rank, far, flats = (
        step / 4,
        both[Way("experts", "across")] / 4,
        once[Way("experts", "across")],
    )
    assert far / (NODES - 1) == EACH * (flats / 4) / (NODES * EACH - 1) == a_rank / 2


@pytest.mark.parametrize("zero", [0, 2])
def test_copies_of_an_expert_are_summed_by_all_that_have_it(
    zero: ZeroLevel, pool: WorkerPool
) -> None:
    """As predicted, beside the same plan without copies; buckets begin at even places."""
    names, rehearsal = ("gradients", "parameters"), CASE.rehearsal()
    view = ClusterView((chips(H100, 80, EACH, nodes=NODES, gbit=100),))
    found, predicted = [], []
    for last in (3, (1, 3)):
        plan = replace(CASE, zero=zero, expert_places=((0, 1, 2, 3, last),) * NUM_LAYERS).plan()
        ranks = pool.run(counted, plan, rehearsal, names, world_size=plan.world_size)
        found.append(sum(count.bytes for rank in ranks for count in rank.values()))
        sent = sent_by_plan(plan, rehearsal.spec, view, seq_len=rehearsal.seq_len)
        predicted.append(sum(size for way, size in sent.items() if way.name in names))
    assert found[1] - found[0] == pytest.approx(predicted[1] - predicted[0], rel=1e-3)
    assert predicted[1] > predicted[0]

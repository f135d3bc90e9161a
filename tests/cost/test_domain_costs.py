"""Plans with domains: bytes, memory and seconds of sums inside each and between them, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.cost.choice import Group, choice_of, ways_of_domains
from weft.cost.memory import memory_of_plan
from weft.cost.sent import Way, sent_by_plan
from weft.cost.timing import Software
from weft.cost.traffic import NETWORK_REACHED
from weft.models.llama.sizes import SIZES
from weft.models.registry import param_specs
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan, ZeroLevel
from weft.simulate.step import Knowledge, time_of_plan

SPEC = SIZES["llama2-7b"]
PARAMS = sum(param.numel for param in param_specs(SPEC))
HALVES = tuple(range(8)), tuple(range(8, 16))
NODES = ClusterView((ChipPool(chip=catalogue()["H100-SXM5-80GB"], num_nodes=2, chips_per_node=8),))
SEQ = 4096
FAR, NEAR = (Way("gradients", reach) for reach in ("across", "node"))


def beside(zero: ZeroLevel = 0) -> Plan:
    """Two pipelines, each on a node of eight."""
    pipelines = (_pipeline(ranks, zero, samples=64) for ranks in HALVES)
    return Plan(num_layers=SPEC.num_layers, pipelines=tuple(pipelines))


def alone(zero: ZeroLevel = 0) -> Plan:
    """One mesh on both nodes."""
    pipeline = _pipeline(range(16), zero, samples=128)
    return Plan(num_layers=SPEC.num_layers, pipelines=(pipeline,))


def _pipeline(ranks, zero: ZeroLevel, samples: int) -> PipelinePlan:
    stage = StagePlan(
        mesh=Mesh.of(ranks, dp=len(ranks)),
        layers=(0, SPEC.num_layers),
        device="cuda",
        precision="bf16",
        zero=zero,
    )
    return PipelinePlan(stages=(stage,), samples=samples, microbatch=samples)


@pytest.mark.parametrize("make", [beside, alone])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_between_domains(make, zero: ZeroLevel) -> None:
    """7B in fp32: each of two domains sends and receives 27 GB, where a ring of all takes 51."""
    apart = replace(make(zero), domains=HALVES)
    sent = sent_by_plan(apart, SPEC, NODES, seq_len=SEQ)
    assert sent[FAR] / 2 == 2 * (2 - 1) / 2 * 4 * PARAMS == pytest.approx(26.95e9, rel=1e-3)
    eight = sent_by_plan(replace(apart, sums="fp8"), SPEC, NODES, seq_len=SEQ)
    assert eight[FAR] == sent[FAR] / 4 * 129 / 128 and eight[NEAR] == sent[NEAR]
    times = 2 if zero == 0 else 1
    assert sent[NEAR] == 2 * 7 * times * 4 * PARAMS
    assert Way("parameters", "across") not in sent
    if zero in (1, 2):
        assert sent[Way("parameters", "node")] == 2 * 7 * 2 * PARAMS
    whole = sent_by_plan(make(), SPEC, NODES, seq_len=SEQ)
    assert whole[FAR] / 16 == 2 * 15 / 16 * 4 * PARAMS == pytest.approx(50.5e9, rel=1e-3)


def test_domains_of_several_ranks_and_of_one() -> None:
    """Counted over what holds the same: of a stage within one domain there is nothing to sum."""
    assert ways_of_domains(beside()) == {(0, 0): 0, (1, 0): 0}
    assert ways_of_domains(replace(beside(), domains=HALVES)) == {(0, 0): 8, (1, 0): 8}
    thirds = (HALVES[0], HALVES[1][:6], HALVES[1][6:])
    assert ways_of_domains(replace(beside(), domains=thirds)) == {(0, 0): 8, (1, 0): 2}
    first, last = (
        replace(_pipeline(ranks, 0, samples=8).stages[0], layers=layers)
        for ranks, layers in zip(HALVES, ((0, 16), (16, 32)), strict=True)
    )
    stages = PipelinePlan(stages=(first, last), samples=8, microbatch=8)
    line = Plan(num_layers=32, pipelines=(stages,), domains=HALVES)
    assert ways_of_domains(line) == {(0, 0): 0, (0, 1): 0}


@pytest.mark.parametrize("make", [beside, alone])
def test_state_is_divided_inside_a_domain(make) -> None:
    def state(plan: Plan) -> tuple[float, float, float]:
        memory = memory_of_plan(plan, SPEC, SEQ)[9]
        return memory.weights, memory.grads, memory.optimizer

    for zero, shared in ((1, 1), (2, 2), (3, 3)):
        apart = state(replace(make(zero), domains=HALVES))
        copies = state(make(0))
        parts = [8 if number >= 3 - shared else 1 for number in range(3)]
        assert apart[0] == pytest.approx(copies[0] / parts[0])
        assert apart[2] == pytest.approx(copies[2] / 8)
        assert apart[2] == pytest.approx(state(make(min(zero, 2)))[2] * 2)


def test_groups_of_a_choice() -> None:
    """Those of a domain are neighbours; one of each domain, on nodes of their own, sum the rest."""
    for plan in (beside(2), alone(2)):
        pipeline, many = plan.pipelines[0], len(plan.pipelines)
        apart = choice_of(pipeline, 0, SEQ, many, shard_ways=8)
        assert apart.parts(apart.holders(8)) == (Group(8, 1), Group(2, 8))
        assert apart.ways == 8 and apart.num_holders == 16
    deep = choice_of(beside(3).pipelines[0], 0, SEQ, 2, shard_ways=8)
    assert deep.num_holders == 16 and deep.ways == 8
    whole = choice_of(beside(2).pipelines[0], 0, SEQ, 2)
    assert whole.parts(whole.holders(8)) == (Group(16, 8), Group(1, 128))


@pytest.mark.parametrize("gbit", [1, 25])
def test_seconds_of_the_three_moves(gbit: float) -> None:
    """Over a slow network its share of bytes is what counts: each chip carries an eighth."""
    (nodes,) = NODES.pools
    slow = ClusterView((replace(nodes, network_gbit_s=gbit, network_latency_s=0.0),))
    knowledge = Knowledge(software=Software(optimizer_bytes=0.0, data_hidden=0.0))

    def once(plan: Plan) -> float:
        times = time_of_plan(plan, SPEC, slow, seq_len=SEQ, knowledge=knowledge)
        return times.once_s[0]

    far = 4 * PARAMS / 8 / (gbit / 8 * 1e9 * NETWORK_REACHED)
    inside = once(replace(alone(2), domains=HALVES)) - far
    assert 0 < inside < 0.2 * max(far, 1), "inside the node links are fast"
    for make in (beside, alone):
        assert once(replace(make(0), domains=HALVES)) == pytest.approx(far, rel=0.3)
        assert once(make(0)) > 1.4 * once(replace(make(0), domains=HALVES))
    assert once(replace(beside(3), domains=HALVES)) == pytest.approx(far, rel=0.3)

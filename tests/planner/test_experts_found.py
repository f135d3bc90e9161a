"""Experts divided in the search: the best of all plans that there are, where dividing pays."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf

import pytest

from benchmarks.every_plan import WITHOUT_LIMIT, every_pipeline, fits, pool
from weft.axes.held import check_mesh
from weft.cluster.view import ChipPool, ClusterView
from weft.models.decoder_spec import DecoderSpec
from weft.models.llama.sizes import SIZES
from weft.models.registry import dims_of_model, shape_of
from weft.plan.mesh import Mesh
from weft.plan.model import ExpertsSpec
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.fit import shortages
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import search
from weft.planner.validate import validate_plan
from weft.simulate.step import time_of_plan

H100, SEQ_LEN, SAMPLES = "H100-SXM5-80GB", 2048, 4
SPEC = replace(
    SIZES["mixtral-8x7b"],
    num_layers=2,
    seq_len=SEQ_LEN,
    experts=ExpertsSpec(count=4, top_k=2, balance=0.02),
)
CASES: dict[str, tuple[ChipPool, ...]] = {
    "one node": (pool(H100, 45, 4),),
    "two nodes": (pool(H100, 60, 2, 2, gbit=400),),
    "one chip": (pool(H100, 80, 1),),
    "unequal loads": (pool(H100, 45, 4),),
    "a first layer without experts": (pool(H100, 8, 4),),
}
MOST = {"unequal loads": 2.0}
"""Of the most visited expert, over the mean: every token goes to it."""


DENSE = {"a first layer without experts": 1}
"""First layers that have none; 0 elsewhere."""


def expecting(imbalance: float, *, dense: int = 0) -> DecoderSpec:
    """The model, with loads of experts that may be unequal, and first layers that have none."""
    assert SPEC.experts is not None
    experts = replace(SPEC.experts, imbalance=imbalance, dense_layers=dense)
    return replace(SPEC, experts=experts)


def divided(plan: Plan) -> Iterator[Plan]:
    """The plan, and it with the experts divided among ranks of each mesh in every even way."""
    (pipeline,) = plan.pipelines
    yield plan
    for ways in (2, 4):
        stages = []
        for stage in pipeline.stages:
            same, rest = divmod(stage.mesh.size("dp"), ways)
            axes = (("dp", same), ("ep", ways), ("tp", stage.mesh.size("tp")))
            stages.append(stage if rest else replace(stage, mesh=Mesh(stage.mesh.ranks, axes)))
        if any(stage.mesh.size("ep") > 1 for stage in stages):
            yield replace(plan, pipelines=(replace(pipeline, stages=tuple(stages)),))


def ways_to_send(plan: Plan) -> Iterator[Plan]:
    """Tokens to experts in some pieces, in one step or two."""
    for pieces, ways in product((1, 2, 4), (0, 1)):
        yield plan.each(
            lambda stage, pieces=pieces, ways=ways: (
                replace(stage, expert_pieces=pieces, expert_ways=ways)
                if stage.mesh.size("ep") > 1
                else stage
            )
        )


def test_slow_links_want_pieces_and_late_ones_two_steps() -> None:
    """Of four ranks on two nodes: the same exchange over links that differ."""
    mesh = Mesh.of(range(4), ep=4)
    stage = StagePlan(mesh=mesh, layers=(0, 2), device="cuda", precision="bf16")
    pipeline = PipelinePlan(stages=(stage,), samples=SAMPLES, microbatch=SAMPLES)
    plan = Plan(num_layers=2, pipelines=(pipeline,))

    def best(gbit: float, late_s: float) -> tuple[int, int]:
        (two,) = CASES["two nodes"]
        slow = replace(two, num_nodes=2, network_gbit_s=gbit, network_latency_s=late_s)
        times = {
            (each.pipelines[0].stages[0].expert_pieces, each.pipelines[0].stages[0].expert_ways): (
                time_of_plan(each, SPEC, ClusterView((slow,)), seq_len=SEQ_LEN).step_s
            )
            for each in ways_to_send(plan)
        }
        return min(times, key=lambda way: times[way])

    assert best(gbit=20, late_s=1e-6) == (4, 1)
    assert best(gbit=400, late_s=0.1) == (1, 0)


def test_unlike_chips_of_one_mesh_want_unlike_numbers_of_experts() -> None:
    """A chip of a third of the rate: as even shares leave it behind, and too few the other."""
    cluster = ClusterView((pool(H100, 80, 1), pool("L40S", 48, 1)))
    spec = replace(SPEC, experts=ExpertsSpec(count=32, top_k=16))

    def seconds(*shares: int) -> float:
        mesh = Mesh.of(range(2), ep=2).with_shares(ep=shares)
        stage = StagePlan(mesh=mesh, layers=(0, 2), device="cuda", precision="bf16")
        stage = replace(stage, sample_shares=(3, 1))
        pipeline = PipelinePlan(stages=(stage,), samples=SAMPLES, microbatch=SAMPLES)
        plan = Plan(num_layers=2, pipelines=(pipeline,))
        assert Plan.from_json(plan.to_json()) == plan
        return time_of_plan(plan, spec, cluster, seq_len=SEQ_LEN).step_s

    assert seconds(3, 1) < 0.8 * seconds(1, 1)
    assert seconds(3, 1) < seconds(31, 1)
    assert seconds(1, 3) > seconds(1, 1)


def test_divided_experts_take_as_long_as_the_most_visited_ones() -> None:
    """Of four experts on four ranks one has twice the mean: its rank computes and receives twice as
    much, on two ranks 4 / 3 as much, and where each has all nobody waits for another."""
    cluster = ClusterView(CASES["one node"])

    def expert_seconds(imbalance: float, **axes: int) -> float:
        stage = StagePlan(mesh=Mesh.of(range(4), **axes), layers=(0, 2), device="cuda")
        stage = replace(stage, precision="bf16")
        pipeline = PipelinePlan(stages=(stage,), samples=SAMPLES, microbatch=SAMPLES)
        plan = Plan(num_layers=2, pipelines=(pipeline,))
        return time_of_plan(plan, expecting(imbalance), cluster, seq_len=SEQ_LEN).step_s

    shape = shape_of(expecting(2.0)).experts
    assert shape is not None
    assert [shape.busiest(own) for own in (1, 2, 4)] == pytest.approx([2, 4 / 3, 1])
    assert expert_seconds(2.0, dp=4) == expert_seconds(1.0, dp=4)
    assert 1.2 < expert_seconds(2.0, ep=4) / expert_seconds(1.0, ep=4) < 2
    assert expert_seconds(2.0, ep=4) > expert_seconds(2.0, dp=2, ep=2)


@pytest.mark.parametrize("name", CASES)
def test_what_is_found_is_the_fastest_of_all(name: str) -> None:
    spec = expecting(MOST.get(name, 1.0), dense=DENSE.get(name, 0))
    best, ways = inf, 1
    for one, used in every_pipeline(CASES[name], SPEC.num_layers, SAMPLES, shared=False):
        for plan in divided(one):
            if fits(plan, spec, used, SEQ_LEN, used.world_size):
                step_s = time_of_plan(plan, spec, used, seq_len=SEQ_LEN).step_s
                if step_s < best:
                    best = step_s
                    ways = max(stage.mesh.size("ep") for _, _, stage in plan.stages())
    workload = Workload(spec=spec, seq_len=SEQ_LEN, samples=SAMPLES)
    options = Options(effort=WITHOUT_LIMIT)
    problem = Problem(workload, ClusterView(CASES[name]), options=options)
    answer = search(problem)
    found = answer.best
    assert not shortages(found.plan, problem.on(found.cluster))
    assert answer.bound_s <= best * (1 + 1e-9)
    assert found.time.step_s <= best * (1 + 1e-9)
    chosen = [stage.mesh.size("ep") for _, _, stage in found.plan.stages()]
    assert (max(chosen) > 1) == (ways > 1)
    assert (ways > 1) == (name in ("one node", "two nodes"))
    every = [
        time_of_plan(plan, spec, found.cluster, seq_len=SEQ_LEN)
        for plan in ways_to_send(found.plan)
    ]
    assert found.time.step_s <= min(time.step_s for time in every) * (1 + 1e-9)
    plan = Plan.from_json(found.plan.to_json())
    validate_plan(plan, num_layers=SPEC.num_layers, global_batch=SAMPLES)
    for _, _, stage in plan.stages():
        check_mesh(dims_of_model(SPEC), stage.mesh, "mesh")

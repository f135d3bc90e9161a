"""Unlike chips of which fast ones hold more experts: what is found, beside all ways to divide."""

from dataclasses import replace
from itertools import product
from math import inf

from planner.test_experts_found import H100, SEQ_LEN, SPEC

from benchmarks.every_plan import WITHOUT_LIMIT, pool
from weft.axes.held import check_mesh
from weft.cluster.view import ClusterView
from weft.models.registry import dims_of_model
from weft.plan.mesh import Mesh
from weft.plan.model import ExpertsSpec
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.fit import shortages
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import search
from weft.planner.search.unlike_experts import unlike_experts
from weft.planner.validate import validate_plan

EXPERTS, SAMPLES = 6, 4
MODEL = replace(SPEC, d_ff=SPEC.d_ff // 2, experts=ExpertsSpec(count=EXPERTS, top_k=2))


def problem(fast_gib: float, slow_gib: float) -> Problem:
    pools = (pool(H100, fast_gib, 1, gbit=400), pool("L40S", slow_gib, 1, gbit=400))
    work = Workload(spec=MODEL, seq_len=SEQ_LEN, samples=SAMPLES)
    options = Options(effort=WITHOUT_LIMIT, unlike_meshes=True)
    return Problem(work, ClusterView(pools), options=options)


def every_way() -> list[Plan]:
    """Of a mesh of both chips: samples of either, experts of either, levels of ZeRO, recompute."""
    found = []
    for micro, zero, recompute in product((2, 4), (0, 1, 2), ("off", "full")):
        for first, experts in product(range(1, micro), range(1, EXPERTS)):
            mesh = Mesh.of(range(2), ep=2).with_shares(ep=(experts, EXPERTS - experts))
            stage = StagePlan(
                mesh=mesh,
                layers=(0, MODEL.num_layers),
                device="cuda",
                precision="bf16",
                recompute=recompute,
                zero=zero,
                sample_shares=(first, micro - first),
            )
            line = PipelinePlan(stages=(stage,), samples=SAMPLES, microbatch=micro)
            found.append(Plan(num_layers=MODEL.num_layers, pipelines=(line,)))
    return found


def test_fast_chips_hold_more_where_that_is_the_fastest_of_all_ways() -> None:
    """What moves lead to is what all ways one by one say; and the search takes it where neither
    chip has room for all experts."""
    asked = problem(22, 16)
    best = inf
    for plan in every_way():
        if not shortages(plan, asked):
            best = min(best, asked.time(plan).step_s)
    one = unlike_experts(asked)
    assert one is not None and one.time.step_s <= best * (1 + 1e-9)
    (stage,) = (stage for _, _, stage in one.plan.stages())
    fast, slow = stage.mesh.shares("ep")
    assert fast + slow == EXPERTS and fast > slow
    found = search(asked)
    assert found.best.plan == one.plan and found.bound_s <= found.best.time.step_s
    plan = Plan.from_json(one.plan.to_json())
    validate_plan(plan, num_layers=MODEL.num_layers, global_batch=SAMPLES)
    check_mesh(dims_of_model(MODEL), stage.mesh, "mesh")


def test_where_all_have_room_pipelines_may_be_faster() -> None:
    """It is not taken because it is there."""
    found = search(problem(80, 48)).best
    one = unlike_experts(problem(80, 48))
    assert one is not None and found.time.step_s <= one.time.step_s


def test_like_chips_divide_evenly() -> None:
    both = problem(22, 16)
    pools = (both.cluster.pools[0], both.cluster.pools[0])
    assert unlike_experts(replace(both, cluster=ClusterView(pools))) is None

"""Domains in a search of many chips: priced for the best plans, and explained."""

import re
from dataclasses import replace

import pytest

from benchmarks.every_plan import CASES, pool
from weft.cluster.view import ClusterView
from weft.models.llama.sizes import SIZES
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.explain import why_no_domains
from weft.planner.fit import shortages
from weft.planner.forecast import forecast
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import search
from weft.planner.search.domains import BEST_FEW, domains_of_kinds, with_best_domains
from weft.simulate.step import StepTime

H100, A100 = "H100-SXM5-80GB", "A100-SXM4-80GB"
SPEC = replace(SIZES["llama2-7b"], num_layers=4)


def test_domains_of_many_chips_are_priced_for_the_best_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search itself is the same as without them, and few more plans are timed."""
    timed: list[Plan] = []
    right = Problem.time

    def counted(self: Problem, plan: Plan) -> StepTime:
        timed.append(plan)
        return right(self, plan)

    monkeypatch.setattr(Problem, "time", counted)
    chips = ClusterView((pool(H100, 80, 8, nodes=8, gbit=5),))
    workload = Workload(spec=replace(SPEC, num_layers=8), seq_len=2048, samples=256)
    options = Options(leave_idle=False, max_split=1, max_stages=1, zero=(0,))
    without = Problem(workload, chips, options=options)
    whole = search(without)
    before = len(timed)
    problem = replace(without, options=replace(options, domains=True))
    found = search(problem)
    assert len(timed) - 2 * before <= 3 * BEST_FEW
    assert found.considered == whole.considered and found.simulated == whole.simulated
    assert not whole.best.plan.domains
    assert found.best.plan == replace(whole.best.plan, domains=found.best.plan.domains)
    assert found.best.plan.domains == tuple(tuple(range(n, n + 8)) for n in range(0, 64, 8))
    assert found.best.time.step_s == right(problem, found.best.plan).step_s
    assert found.best.time.step_s < whole.best.time.step_s


@pytest.mark.parametrize("name", ["two-nodes", "short-nodes", "two-pools", "short-pools"])
def test_domains_are_priced_where_there_is_room(name: str) -> None:
    """Of the best plan without them: they are taken where they are faster and fit."""
    case = CASES[name]
    alone = Problem(case.workload, case.cluster, options=replace(case.options, domains=False))
    best = search(alone).best
    problem = replace(alone, options=case.options)
    (found,) = with_best_domains([best], problem)
    there = problem.on(best.cluster)
    kinds = [each.plan for each in domains_of_kinds(best.plan, best.cluster)]
    better = [
        plan
        for plan in kinds
        if not shortages(plan, there) and there.time(plan).step_s < best.time.step_s
    ]
    assert bool(found.plan.domains) == bool(better) == name.startswith("two")
    assert found.time.step_s == min(there.time(plan).step_s for plan in [best.plan, *better])
    assert kinds, "each case has some to look at"
    if name.startswith("short"):
        assert any(shortages(plan, there) for plan in kinds)


def test_why_a_plan_has_no_domains() -> None:
    """Both times are said; on links that are alike nothing is priced, and one rank has none."""
    pools = pool(H100, 80, 4, gbit=400), pool(A100, 80, 4, gbit=400)
    workload = Workload(spec=replace(SPEC, num_layers=8), seq_len=2048, samples=32)
    stages = (
        StagePlan(mesh=Mesh.of(ranks, dp=4), layers=(0, 8), device="cuda", precision="bf16")
        for ranks in (range(4), range(4, 8))
    )
    pipelines = (PipelinePlan(stages=(stage,), samples=16, microbatch=4) for stage in stages)
    plan = Plan(num_layers=8, pipelines=tuple(pipelines))

    def why(chips: ClusterView, *, asked: bool = True) -> str:
        problem = Problem(workload, chips, options=Options(domains=asked))
        return why_no_domains(forecast(plan, problem))

    words = why(ClusterView(pools))
    found = re.fullmatch(r"domains: none; by pipeline a step would take (.*) s, not (.*)", words)
    assert found is not None, words
    there = Problem(workload, ClusterView(pools))
    halves = replace(plan, domains=(tuple(range(4)), tuple(range(4, 8))))
    assert found[1] == f"{there.time(halves).step_s:.3g}"
    assert found[2] == f"{there.time(plan).step_s:.3g}"
    assert why(ClusterView(pools), asked=False).endswith("plan.auto.domains=false asks")
    assert why(ClusterView((pool(H100, 80, 8),))) == "domains: none, all links are alike"

"""What limits a plan, why others lost, and what other chips would bring."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.cluster_file import read_view
from weft.cluster.view import ChipPool, ClusterView
from weft.cost.memory import memory_of_plan
from weft.models.llama.sizes import SIZES
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, Recompute, StagePlan, ZeroLevel
from weft.planner.explain import alternatives, pruned_in_words, settings, what_would_help
from weft.planner.forecast import forecast
from weft.planner.limits import Limits, _against_updates, _has_smaller
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import Candidate, Found, Pruned, search
from weft.simulate.step import time_of_plan

A100 = catalogue()["A100-SXM4-80GB"]
WORKLOAD = Workload(spec=SIZES["llama2-7b"], seq_len=4096, samples=64)


def nodes(chips_per_node: int, gbit: float = 200) -> ClusterView:
    pool = ChipPool(
        chip=A100,
        num_nodes=16 // chips_per_node,
        chips_per_node=chips_per_node,
        network_gbit_s=gbit,
    )
    return ClusterView((pool,))


def plan(
    meshes: int = 1,
    tp: int = 1,
    *,
    samples: int = 64,
    micro: int = 16,
    recompute: Recompute = "off",
    zero: ZeroLevel = 1,
) -> Plan:
    size = 16 // meshes
    cuts = [32 * m // meshes for m in range(meshes + 1)]
    stages = tuple(
        StagePlan(
            mesh=Mesh.of(range(m * size, (m + 1) * size), dp=size // tp, tp=tp),
            layers=(cuts[m], cuts[m + 1]),
            precision="bf16",
            device="cuda",
            zero=zero,
            recompute=recompute,
        )
        for m in range(meshes)
    )
    pipeline = PipelinePlan(stages=stages, samples=samples, microbatch=micro)
    return Plan(num_layers=32, pipelines=(pipeline,))


@pytest.mark.parametrize(
    ("made", "cluster", "cause", "words"),
    [
        (plan, nodes(8), "arithmetic", ""),
        (lambda: plan(tp=8), nodes(1), "communication", "less tensor parallelism and more stages"),
        (lambda: plan(samples=16), nodes(1, gbit=1), "exchange", "more samples a step, or fewer"),
        (lambda: plan(meshes=8, micro=64), nodes(8), "waiting", "more samples a step, or smaller"),
        (lambda: plan(recompute="full"), nodes(8), "arithmetic", "more stages, a higher ZeRO"),
        (lambda: plan(recompute="full", zero=3), nodes(8), "arithmetic", "more stages or larger"),
        (lambda: plan(recompute="activation"), nodes(8), "arithmetic", ""),
    ],
    ids=["computes", "talks", "exchanges", "waits", "recomputes", "has-zero", "little-again"],
)
def test_the_cause_is_what_takes_most(
    made: Callable[[], Plan], cluster: ClusterView, cause: str, words: str
) -> None:
    cast = forecast(made(), Problem(WORKLOAD, cluster))
    limits = Limits(cast)
    assert limits.cause == cause
    assert sum(limits.parts.values()) == pytest.approx(cast.step_s)
    said = " ".join(limits.advice())
    assert words in said if words else not said
    first, *_, last = limits.sentences()
    assert first.startswith("slowest: stage") and last.startswith("fullest memory: stage")


def candidate(made: Plan, name: str, cluster: ClusterView) -> Candidate:
    return Candidate(
        name=name,
        plan=made,
        cluster=cluster,
        time=time_of_plan(made, WORKLOAD.spec, cluster, seq_len=4096),
        memory=memory_of_plan(made, WORKLOAD.spec, 4096),
    )


@cache
def some_search() -> Found:
    return search(some_problem())


def some_problem() -> Problem:
    """With next to nothing to choose."""
    options = Options(max_split=1, max_stages=1, micros=(1,), zero=(1,), recompute=("full",))
    return Problem(WORKLOAD, nodes(8), options=options)


def found_of(*made: Candidate) -> Found:
    pruned = Pruned()
    pruned.add("memory", "stage 0 needs 91.2 GiB of 73.6", count=3)
    return replace(
        some_search(), best=made[0], others=made[1:], considered=9, pruned=pruned, seconds=0.5
    )


def test_why_the_others_lost() -> None:
    cluster = nodes(8)
    best = candidate(plan(meshes=2, micro=8), "best", cluster)
    rivals = (
        candidate(plan(meshes=2, micro=8, recompute="full"), "recomputes", cluster),
        candidate(plan(meshes=2, micro=32), "waits", cluster),
        candidate(plan(meshes=2, micro=8, tp=8), "talks", cluster),
    )
    cast = forecast(best.plan, Problem(WORKLOAD, cluster))
    why = list(alternatives(found_of(best, *rivals), cast, cast.problem))
    assert [alternative.slower > 0 for alternative in why] == [True] * 3
    first, second, third = (alternative.words for alternative in why)
    assert first.startswith("computes ") and "recomputes, for" not in first
    assert second.startswith("waits for other stages ")
    assert third.startswith("communicates inside layers ")


def test_recompute_that_memory_forces_is_said() -> None:
    small = ClusterView(
        tuple(replace(pool, chip=replace(A100, memory_gib=40.0)) for pool in nodes(8).pools)
    )
    best = candidate(plan(meshes=2, micro=8, recompute="full"), "best", small)
    other = candidate(plan(meshes=2, micro=16, recompute="full"), "other", small)
    cast = forecast(best.plan, Problem(WORKLOAD, small))
    (why,) = alternatives(found_of(best, other), cast, cast.problem)
    need = memory_of_plan(plan(meshes=2, micro=16), WORKLOAD.spec, 4096)[0].total / 2**30
    assert why.words.endswith(
        "; it recomputes (activation checkpointing), for without it a A100-SXM4-80GB would need "
        f"{need:.1f} GiB of 36.8"
    )


def test_a_node_more_is_worth_what_its_tokens_are() -> None:
    pools = (replace(pool, price_per_hour=2.0) for pool in nodes(8).pools)
    problem = replace(some_problem(), cluster=ClusterView(tuple(pools)))
    more, *_ = what_would_help(problem, search(problem).best, searches=1)
    hired, chips = 2.0 * problem.cluster.world_size, problem.cluster.pools[0].chips_per_node
    assert more.change.startswith("one more node of ") and more.gain > 0
    assert more.costs_per_hour == 2.0 * chips
    assert more.worth_per_hour == pytest.approx(more.gain * hired)
    assert more.pays == pytest.approx(more.gain * hired / (2.0 * chips))


def test_chips_that_a_plan_leaves_idle_are_not_hired() -> None:
    used, idle = (replace(pool, price_per_hour=2.0) for _ in range(2) for pool in nodes(8).pools)
    cluster = ClusterView((used, idle))
    best = candidate(plan(meshes=2, tp=4, micro=8), "best", ClusterView((used,)))
    problem = replace(some_problem(), cluster=cluster)
    node, *helps = what_would_help(problem, best, searches=1)
    assert node.costs_per_hour == 2.0 * 8, "what the file has besides is no part of a node"
    hired = 2.0 * best.cluster.world_size
    assert helps
    assert [each.worth_per_hour for each in helps] == [pytest.approx(h.gain * hired) for h in helps]


@pytest.mark.parametrize("network", ["", ", network_gbit: 10"])
def test_no_node_more_on_a_network_that_nobody_knows(network: str, tmp_path: Path) -> None:
    """A machine alone needs none, and a rate that was made up would be advice made up."""
    sheet = "name: T, peak_tflops: {bf16: 100}, memory_gib: 80, memory_gb_s: 800, link_gb_s: 50"
    file = tmp_path / "one.yaml"
    file.write_text(
        f"chips: [{{{sheet}}}]\npools: [{{chip: T, nodes: 1, chips_per_node: 4{network}}}]\n"
    )
    problem = replace(some_problem(), cluster=read_view(file))
    helps = [*what_would_help(problem, search(problem).best, searches=1)]
    assert helps and bool(network) == helps[0].change.startswith("one more node of 4 x T")


def test_advice_is_what_a_plan_has_not_done_yet() -> None:
    """No copy updates all of it at ZeRO 1, a sample is not divided, and one copy is not many."""
    alone = StagePlan(mesh=Mesh.of(range(4), dp=4), layers=(0, 1), zero=1)
    made = Plan(num_layers=1, pipelines=(PipelinePlan(stages=(alone,), samples=1, microbatch=1),))
    assert "ZeRO" not in _against_updates(made)
    assert "ZeRO 1" in _against_updates(made.each(lambda stage: replace(stage, zero=0)))
    single = made.each(lambda stage: replace(stage, zero=0, mesh=Mesh.of((0,))))
    assert "ZeRO" not in _against_updates(single)
    (pipeline,) = made.pipelines
    assert not _has_smaller(replace(pipeline, samples=4, microbatch=4))
    assert _has_smaller(replace(pipeline, samples=8, microbatch=8))


def test_what_would_help_without_another_search() -> None:
    cluster = nodes(8, gbit=10)
    best = candidate(plan(meshes=2, tp=4, micro=8, recompute="full"), "best", cluster)
    asked = what_would_help(Problem(WORKLOAD, cluster), best, searches=0)
    helps = {each.change: each for each in asked}
    assert not any(name.startswith("one more node") for name in helps)
    faster = {name for name, each in helps.items() if each.gain > 0.001}
    assert {"links inside nodes x 2", "network between nodes x 2"} <= faster
    assert helps["memory x 2"].gain >= helps["memory x 1.25"].gain >= 0
    inside = helps["links inside nodes x 2"]
    assert inside.step_s == pytest.approx(best.time.step_s / (1 + inside.gain))
    assert f"nodes x 2, by this plan: {inside.gain:.1%} more tokens a second" in inside.words


def test_what_was_pruned() -> None:
    made = candidate(plan(), "one", nodes(8))
    assert list(pruned_in_words(found_of(made))) == [
        "9 plans considered in 0.5 s, 3 of them pruned, each for a reason",
        "  memory: 3, such as stage 0 needs 91.2 GiB of 73.6",
    ]


def test_settings_tell_plans_apart() -> None:
    assert settings(plan(meshes=2, tp=4, micro=8)) == "1f1b, ZeRO 1, 8 micro-batches of 8"
    assert settings(plan(recompute="full")) == "recompute, ZeRO 1, 4 micro-batches of 16"
    (whole,) = plan(micro=24).pipelines
    ragged = replace(plan(), pipelines=(replace(whole, samples=64),))
    assert settings(ragged).endswith("3 micro-batches of up to 24, 64 samples in all")
    one = replace(plan(), pipelines=(replace(whole, samples=18),))
    assert settings(one).endswith("ZeRO 1, 1 micro-batch of 18")


def test_more_memory_spares_recomputation() -> None:
    cluster = nodes(8)
    kept = memory_of_plan(plan(), WORKLOAD.spec, 4096)[0].total / 2**30
    small = replace(A100, memory_gib=kept / 0.92 / 1.5)
    tight = ClusterView((replace(cluster.pools[0], chip=small),))
    best = candidate(plan(recompute="full"), "best", tight)
    asked = what_would_help(Problem(WORKLOAD, tight), best, searches=0)
    gains = {each.change: each.gain for each in asked}
    assert gains["memory x 1.25"] == 0
    assert 0.2 < gains["memory x 2"] < 0.4

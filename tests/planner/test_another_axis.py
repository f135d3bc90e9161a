"""An axis that divides tokens in the search: tried where samples are long or few, or nothing else
fits."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import Any

import pytest

from benchmarks.every_plan import WITHOUT_LIMIT, Case, every_pipeline, fits, pool
from weft.axes.axis import Axis
from weft.axes.held import check_mesh
from weft.cluster.view import ClusterView
from weft.config.errors import ConfigError
from weft.cost.timing import WEFT
from weft.models.llama.sizes import SIZES
from weft.models.registry import dims_of_model
from weft.plan.layout import Dim, Form
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan, ZeroLevel
from weft.planner import validate
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import meshes as searched
from weft.planner.search import search
from weft.planner.search.found import Found
from weft.planner.search.frames import UNMADE
from weft.planner.search.verdict import verdict
from weft.simulate.step import Knowledge, time_of_plan

module: Any = sys.modules["weft.planner.search.search"]
HIDING = Knowledge(software=replace(WEFT, context_hidden=0.8))
"""Of an axis whose messages go beside computing."""
H100, A100 = "H100-SXM5-80GB", "A100-SXM4-80GB"


class Context(Axis):
    """Divides the sequence everywhere, and no parameter."""

    name = "cp"
    kinds = MappingProxyType(
        {
            "Attention": "OwnQueries",
            "LinearCrossEntropy": "OwnTokens",
            "VocabCrossEntropy": "OwnVocab",
        }
    )

    def divides(self, dim: Dim, form: Form) -> bool:
        return dim.name == "seq" and form != "param"

    def part(self, dim: Dim, ways: int, position: int) -> tuple[range, ...]:
        each = dim.size // ways
        return (range(position * each, (position + 1) * each),)

    def allows(self, dims: Iterable[Dim], ways: int) -> bool:
        return all(dim.size % ways == 0 for dim in dims if dim.name == "seq")

    def check(self, dims: Iterable[Dim], ways: int, key: str) -> None:
        raise NotImplementedError


def divided(plan: Plan) -> Iterator[Plan]:
    """The plan with each tensor-parallel group divided by both axes in every way, and with every
    level of ZeRO where that makes copies."""
    (pipeline,) = plan.pipelines
    mesh = pipeline.stages[0].mesh
    together = mesh.size("tp")
    for context_ways in (n for n in range(1, together + 1) if together % n == 0):
        axes = (("dp", mesh.size("dp")), ("cp", context_ways), ("tp", together // context_ways))
        levels: tuple[ZeroLevel, ...] = (0, 1, 2, 3)
        shared = mesh.size("dp") == 1 and context_ways > 1
        for zero in levels if shared else (pipeline.stages[0].zero,):
            stages = tuple(
                replace(stage, mesh=Mesh(stage.mesh.ranks, axes), zero=zero)
                for stage in pipeline.stages
            )
            yield replace(plan, pipelines=(replace(pipeline, stages=stages),))


CASES = {
    "one sample": Case(pools=(pool(H100, 75, 2),), num_layers=2, samples=1, seq_len=32768),
    "short of memory": Case(pools=(pool(H100, 12, 4),), num_layers=3, samples=2, seq_len=4096),
    "two samples": Case(pools=(pool(A100, 30, 4),), num_layers=2, samples=2, seq_len=16384),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_found_is_the_fastest_of_all(name: str) -> None:
    case = CASES[name]
    best, ways = inf, 1
    for one in every_pipeline(case.pools, case.num_layers, case.samples, shared=False):
        used = one[1]
        for plan in divided(one[0]):
            if fits(plan, case.workload.spec, used, case.seq_len, used.world_size):
                time = time_of_plan(
                    plan, case.workload.spec, used, seq_len=case.seq_len, knowledge=HIDING
                )
                if time.step_s < best:
                    best, ways = time.step_s, plan.pipelines[0].stages[0].mesh.size("cp")
    options = Options(effort=WITHOUT_LIMIT, divides_tokens=True)
    found = search(Problem(case.workload, case.cluster, options=options, knowledge=HIDING)).best
    assert found.time.step_s <= best * (1 + 1e-9)  # or less, where heads are divided instead
    assert found.plan.pipelines[0].stages[0].mesh.size("cp") == ways
    assert ways > 1 or name == "short of memory", "nobody would add this axis"


def test_nobody_tries_it_where_samples_are_short() -> None:
    case = CASES["one sample"]
    best = search(Problem(case.workload, case.cluster)).best.plan
    assert all(stage.mesh.size("cp") == 1 for _, _, stage in best.stages())


def test_few_samples_are_no_slower_on_more_chips() -> None:
    """72 cards were planned 11 % slower than 64: tokens were divided over whole nodes alone. And no
    plan is faster than its bound: heads may be divided instead, which takes less."""
    spec = replace(SIZES["llama3-8b"], seq_len=1 << 15)
    workload = Workload(spec=spec, seq_len=1 << 15, samples=8)
    cards = [ClusterView((pool(H100, 80, 8, nodes, gbit=400),)) for nodes in (8, 9)]
    found = [search(Problem(workload, each)) for each in cards]
    fewer, more = (each.best.time.step_s for each in found)
    assert more <= fewer * (1 + 1e-9)
    for each in found:
        (stage,) = each.best.plan.pipelines[0].stages
        assert stage.mesh.size("cp") == stage.head_ways == 8
        assert 0.8 < each.bound_s / each.best.time.step_s <= 1 + 1e-9


LENGTHS = {4096: False, 1 << 15: True, 1 << 17: True, 1 << 20: True}
"""Tokens of a sample, and whether dividing them is what a person should do."""
CARDS = ClusterView((pool(H100, 80, 8, 2, gbit=3200),))


@pytest.mark.parametrize("seq_len", LENGTHS)
def test_plans_from_short_samples_to_a_million_tokens(seq_len: int) -> None:
    """An 8 B model on 16 cards; nothing that does not divide tokens holds a million."""
    spec = replace(SIZES["llama3-8b"], seq_len=seq_len)
    workload = Workload(spec=spec, seq_len=seq_len, samples=16)
    problem = Problem(workload, CARDS, options=Options(mixed_recompute=True))
    best = search(problem).best
    divided = [stage.mesh.size("cp") > 1 for _, _, stage in best.plan.stages()]
    assert divided == [LENGTHS[seq_len]] * len(divided)
    plan = Plan.from_json(best.plan.to_json())
    validate.validate_plan(plan, num_layers=spec.num_layers, global_batch=16)
    validate.refuse_idle_heads(plan, dims_of_model(spec))
    for _, _, stage in plan.stages():
        check_mesh(dims_of_model(spec), stage.mesh, "mesh")


def test_tokens_are_divided_over_nodes_where_nothing_else_fits() -> None:
    """Attention is less than half of the operations; one sample, on one card of each node."""
    seq_len = 1 << 14
    spec = replace(SIZES["llama3-8b"], num_layers=2, seq_len=seq_len)
    cards = ClusterView((pool(H100, 14, 1, 8, gbit=3200),))
    problem = Problem(Workload(spec=spec, seq_len=seq_len, samples=1), cards)
    assert not problem.divides_tokens
    assert search(problem).best.plan.pipelines[0].stages[0].mesh.size("cp") > 1


CARD = "RTX4090"
FEW = {
    "one on two nodes": ("llama3-8b", 1 << 15, 1, pool(H100, 80, 8, 2, gbit=100), 0.66),
    "one on four cards": ("llama3.2-3b", 3 << 13, 1, pool(CARD, 24, 1, 4, gbit=100), 5.1),
    "two on four nodes": ("llama3-8b", 1 << 15, 2, pool("H100-PCIe-80GB", 80, 2, 4, gbit=200), 2.8),
}


@pytest.mark.parametrize("name", FEW)
def test_tokens_are_divided_where_samples_are_fewer_than_chips(name: str) -> None:
    """A pipeline of one microbatch has all meshes but one idle: 0.94, 13.7 and 4.7 s."""
    size, seq_len, samples, chips, at_most_s = FEW[name]
    workload = Workload(spec=SIZES[size], seq_len=seq_len, samples=samples)
    options = Options(mixed_recompute=True)
    problem = Problem(workload, ClusterView((chips,)), options=options)
    assert not problem.divides_tokens
    found = search(problem)
    assert found.best.plan.pipelines[0].stages[0].mesh.size("cp") > 1
    assert found.bound_s <= found.best.time.step_s <= at_most_s


def test_memory_of_hosts_makes_no_plan_slower() -> None:
    """State on hosts behind 2 GB/s fits, and so do samples that are divided; neither is all."""
    spec = SIZES["llama3.2-3b"]
    workload = Workload(spec=spec, seq_len=3 << 13, samples=4)
    cards = pool(CARD, 24, 1, 4, gbit=100)
    both = replace(cards, host_gib=None), replace(cards, host_gib=128, host_gb_s=2)
    options = Options(mixed_recompute=True, tiers=("device", "host"))
    poor, rich = (search(Problem(workload, ClusterView((each,)), options=options)) for each in both)
    assert rich.best.time.step_s <= poor.best.time.step_s * (1 + 1e-9)
    assert rich.bound_s <= poor.best.time.step_s


@pytest.mark.parametrize(("samples", "at_most_s"), [(9, 0.07), (13, 0.09)])
def test_tokens_are_divided_where_whole_samples_leave_chips_idle(
    samples: int, at_most_s: float
) -> None:
    """Seven of eight chips, or meshes that do not fill them: 0.083 and 0.105 s."""
    workload = Workload(spec=SIZES["llama3.2-1b"], seq_len=2048, samples=samples)
    problem = Problem(workload, ClusterView((pool(H100, 80, 8, 1, gbit=400),)))
    assert not problem.divides_tokens
    found = search(problem)
    assert found.best.cluster.world_size == 8
    assert found.bound_s <= found.best.time.step_s <= at_most_s


@pytest.mark.parametrize(("chips", "samples", "parts"), [(8, 8, 8), (8, 63, 2), (8, 64, 1)])
def test_parts_are_fewer_where_chips_have_more_samples(
    chips: int, samples: int, parts: int
) -> None:
    workload = Workload(spec=SIZES["llama3.2-1b"], seq_len=2048, samples=samples)
    cards = pool(H100, 80, chips, 1, gbit=400)
    problem = Problem(workload, ClusterView((cards,)))
    assert problem.token_parts == parts
    cores = replace(cards, chip=replace(cards.chip, vendor="CPU"))
    assert problem.on(ClusterView((cores,))).token_parts == 1


@pytest.mark.parametrize(("samples", "outside"), [(128, True), (127, False)])
def test_what_is_not_looked_at_is_not_said_to_be_weighed(samples: int, outside: bool) -> None:
    """One sample fewer than eight a card, and they may be halved."""
    spec = SIZES["llama3.2-1b"]
    workload = Workload(spec=spec, seq_len=4096, samples=samples)
    mesh = Mesh.of(tuple(range(2)), cp=2)
    stage = StagePlan(mesh=mesh, layers=(0, 16), precision="bf16", device="cuda")
    plan = Plan(
        num_layers=16, pipelines=(PipelinePlan(stages=(stage,), samples=samples, microbatch=1),)
    )
    reason = verdict(plan, Problem(workload, CARDS), best_s=0.1)
    assert (reason.kind == "shape") == outside, reason
    assert ("tokens of each sample stay in one piece" in reason.words) == outside


def test_experts_go_to_no_host_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fits there, which is seen before all of it is searched."""
    looked, searched_one = list[tuple[str, ...]](), module._searched

    def counted(problem: Problem, *more: object) -> Found:
        looked.append(problem.options.expert_tiers)
        return searched_one(problem, *more)

    monkeypatch.setattr(module, "_searched", counted)
    chips = replace(pool(H100, 80, 8), host_gib=None)
    workload = Workload(spec=SIZES["olmoe-1b-7b"], seq_len=4096, samples=64)
    options = Options(expert_tiers=("device", "host"), schedules=("1f1b",), recompute=("full",))
    found = search(Problem(workload, ClusterView((chips,)), options=options))
    assert "memory" in found.pruned.reasons, "or nobody would look elsewhere"
    assert looked == [("device", "host")]


class WithoutAttention(Context):
    """No runtime of it knows attention."""

    kinds = MappingProxyType({"LinearCrossEntropy": "OwnTokens"})


def test_an_axis_that_cannot_divide_the_model_is_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = CASES["one sample"]
    monkeypatch.setattr(searched, "INSIDE", ("tp",))
    plain = search(Problem(case.workload, case.cluster))
    monkeypatch.setattr(searched, "AXES", {**searched.AXES, "cp": WithoutAttention()})
    monkeypatch.setattr(searched, "INSIDE", ("cp", "tp"))
    found = search(Problem(case.workload, case.cluster))
    assert found.best.time.step_s == plain.best.time.step_s
    assert all(stage.mesh.size("cp") == 1 for _, _, stage in found.best.plan.stages())
    assert "axis" not in plain.pruned.reasons
    out = found.pruned.reasons["axis"]
    assert out.count > 0 and out.examples == [f"{H100}: {UNMADE['axis']}"]


def test_a_plan_along_such_an_axis_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = CASES["one sample"].workload.spec
    stage = StagePlan(mesh=Mesh.of(range(2), cp=2), layers=(0, spec.num_layers))
    pipeline = PipelinePlan(stages=(stage,), samples=2, microbatch=2)
    plan = Plan(num_layers=spec.num_layers, pipelines=(pipeline,))
    monkeypatch.setattr(validate, "AXES", {**validate.AXES, "cp": Context()})
    validate.refuse_unrun_axes(plan, spec)
    monkeypatch.setattr(validate, "AXES", {**validate.AXES, "cp": WithoutAttention()})
    with pytest.raises(ConfigError) as refused:
        validate.refuse_unrun_axes(plan, spec)
    assert str(refused.value) == (
        "pipelines[0].stages[0].mesh.cp = 2: expected 1. cp cannot divide the family llama: "
        "layout.layers.0.attn = 'Attention': expected a kind with a split form: "
        "LinearCrossEntropy. It mixes seq, of which each rank holds a part."
    )

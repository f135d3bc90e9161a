"""What a person is told of one plan: where it lies in the search, and what became of it."""

from dataclasses import replace
from itertools import accumulate
from math import inf
from random import Random

import pytest
from planner.lines import drawn

from benchmarks.every_plan import CASES, WITHOUT_LIMIT, every_pipeline, fits
from weft.cluster.view import ClusterView
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan
from weft.planner.explain import Comparison, compare
from weft.planner.forecast import forecast
from weft.planner.problem import Options, Problem
from weft.planner.search import search
from weft.planner.search.choice import plan_of, used_cluster, used_parts
from weft.planner.search.splits import too_slow
from weft.planner.search.verdict import OutsideError, least_seconds, lines_of, verdict
from weft.simulate.step import time_of_plan

OPTIONS = Options(effort=WITHOUT_LIMIT)
CASE = CASES["odd-layers"]


def asked(
    plan: Plan, cluster: ClusterView = CASE.cluster, options: Options = OPTIONS
) -> Comparison:
    found = search(Problem(CASE.workload, CASE.cluster, options=OPTIONS)).best
    best = forecast(found.plan, Problem(CASE.workload, found.cluster))
    return compare(plan, best, Problem(CASE.workload, cluster, options=options))


def on_a100s(**changes) -> Plan:
    """Two meshes on the second pool, whose ranks are 1 and 2."""
    for plan, _ in every_pipeline(CASE.pools[1:], CASE.num_layers, CASE.samples, shared=False):
        (pipeline,) = plan.pipelines
        if len(pipeline.stages) == 2 and pipeline.stages[0].recompute == "full":
            break
    stages = tuple(
        replace(stage, mesh=replace(stage.mesh, ranks=(number + 1,)), **changes)
        for number, stage in enumerate(pipeline.stages)
    )
    return Plan(num_layers=CASE.num_layers, pipelines=(replace(pipeline, stages=stages),))


def test_plans_are_read_back_as_they_were_written() -> None:
    for seed in range(200):
        each = drawn(Random(seed))
        plan = plan_of([each.line], each.costs.problem)
        used = used_cluster([each.line], each.costs.problem.cluster)
        (line,) = lines_of(plan, used)
        pools = each.costs.pools
        parts = [len(used_parts(pools[s.pool], s)) for s in each.line.sections]
        firsts = zip(accumulate(parts, initial=0), each.line.sections, strict=False)
        numbered = (section._replace(pool=first) for first, section in firsts)
        assert line == replace(each.line, sections=tuple(numbered))


def test_the_bound_that_is_told_is_the_one_that_rules_out() -> None:
    for seed in range(60):
        each = drawn(Random(seed))
        seconds = least_seconds(each.route)
        assert not too_slow(each.route, seconds * 1.001)
        assert too_slow(each.route, seconds * 0.999)
        assert seconds <= each.step_s() * (1 + 1e-12)


def test_no_plan_is_said_to_be_ruled_out_by_a_bound_that_it_beats() -> None:
    """Of all plans of a case that fit: told reasons agree with their times."""
    found = search(Problem(CASE.workload, CASE.cluster, options=OPTIONS))
    best_s, told = found.best.time.step_s, set()
    spec, seq_len = CASE.workload.spec, CASE.seq_len
    every = list(every_pipeline(CASE.pools, CASE.num_layers, CASE.samples, shared=False))
    for plan, used in every[::40]:
        if not fits(plan, spec, used, seq_len, ranks=used.world_size):
            continue
        time = time_of_plan(plan, spec, used, seq_len=seq_len)
        reason = verdict(plan, Problem(CASE.workload, used, options=OPTIONS), best_s=best_s)
        told.add(reason.kind)
        if reason.kind == "bound":
            assert float(reason.words.split()[-2]) <= time.step_s * 1.001
        assert "does not look there" not in reason.words
    assert told == {"bound", "slower"}


def test_more_in_flight_is_weighed_as_it_is() -> None:
    """Where the search looks for it; the bound that is told is that of these numbers."""
    plan = on_a100s()
    (pipeline,) = plan.pipelines
    deeper = replace(plan, pipelines=(replace(pipeline, schedule="1f1b", in_flight=(3, 1)),))
    told = []
    for options in (replace(OPTIONS, in_flight=True), OPTIONS):
        problem = Problem(CASE.workload, CASE.cluster, options=options)
        told.append(verdict(deeper, problem, best_s=inf))
    assert told[0].kind == "slower" and "usual order" not in told[0].words
    assert "in flight" in told[1].words and told[1].kind == "shape"
    (line,) = lines_of(deeper, CASE.cluster)
    assert line.in_flight == (3, 1)


def test_the_best_loses_to_nobody() -> None:
    found = search(Problem(CASE.workload, CASE.cluster, options=OPTIONS)).best
    problem = Problem(CASE.workload, found.cluster, options=OPTIONS)
    best = forecast(found.plan, problem)
    told = compare(found.plan, best, problem)
    assert told.slower == 0 and told.fits
    assert all(part.best == part.rival for part in told.parts)
    reason = verdict(found.plan, problem, best_s=inf)
    assert reason.kind == "slower" and "weighed as it is" in reason.words


def test_a_plan_without_room_is_told_so_with_a_way_out() -> None:
    told = asked(on_a100s(recompute="off"))
    assert not told.fits and told.reason.kind == "memory"
    assert "on A100-SXM4-80GB needs 22.8 GiB of 16.6 that may be planned. " in told.words
    assert "take chips of 25 GiB there" in told.words


def test_parts_add_up_to_the_step() -> None:
    told = asked(on_a100s())
    parts = {part.name: part for part in told.parts}
    seconds = [(part.best, part.rival) for part in told.parts if part.unit == "s"]
    for *each, whole in zip(*seconds, strict=True):
        assert sum(each) == pytest.approx(whole, rel=1e-6)
    assert parts["whole step"].rival == told.step_s
    assert told.slower == pytest.approx(told.step_s / parts["whole step"].best - 1)


@pytest.mark.parametrize(
    ("plan", "options", "words"),
    [
        (on_a100s(passes=2), OPTIONS, "it tries no passes"),
        (on_a100s(), replace(OPTIONS, recompute=("off",)), "recomputation was kept to off"),
        (
            on_a100s(),
            replace(OPTIONS, micros=(2,)),
            "the rank with most samples of a micro-batch was kept to 2",
        ),
        (on_a100s(), replace(OPTIONS, schedules=("zb-v",)), "the schedule was kept to zb-v"),
    ],
)
def test_what_the_search_does_not_look_at(plan: Plan, options: Options, words: str) -> None:
    reason = verdict(plan, Problem(CASE.workload, CASE.cluster, options=options), best_s=1.0)
    assert reason.kind == "shape" and words in reason.words


def test_a_pool_in_two_pipelines_is_outside() -> None:
    first, second = on_a100s().pipelines[0].stages
    alone = [
        replace(on_a100s().pipelines[0], stages=(replace(stage, layers=(0, 5)),), samples=1)
        for stage in (first, second)
    ]
    with pytest.raises(OutsideError, match="alike there, and in one pipeline"):
        lines_of(Plan(num_layers=5, pipelines=tuple(alone)), CASE.cluster)


def test_unlike_chips_as_one_mesh_are_outside() -> None:
    """However even their parts, and however alike a mesh of one kind beside them."""
    first, _ = on_a100s().pipelines[0].stages
    stage = replace(first, mesh=Mesh.of(range(2), dp=2), layers=(0, 5))
    plan = Plan(num_layers=5, pipelines=(PipelinePlan(stages=(stage,), samples=2, microbatch=2),))
    with pytest.raises(OutsideError, match="meshes of unlike chips apart"):
        lines_of(plan, CASE.cluster)
    alike = plan.each(lambda stage: replace(stage, mesh=Mesh.of(range(1, 3), dp=2)))
    assert lines_of(alike, CASE.cluster)

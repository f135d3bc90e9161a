"""What the best plans recompute: no more than memory asks, and the fastest of all that fits."""

from dataclasses import replace

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.models.llama.sizes import SIZES
from weft.plan.plan import Plan
from weft.planner.fit import shortages
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import search
from weft.planner.search.again import with_least_recompute
from weft.planner.search.arrangements import Arrangement, arrangements
from weft.planner.search.found import Candidate
from weft.planner.search.search import (
    AGAIN,
    LEFT,
    MOST_AGAIN,
    MOST_TOGETHER,
    WITH_OTHERS,
    SearchRun,
)
from weft.recompute.asked import offloads

EFFORT = 2000
BOX = ClusterView((ChipPool(chip=catalogue()["H100-SXM5-80GB"], num_nodes=1, chips_per_node=4),))


def asked(options: Options, seq_len: int = 32768, samples: int = 16) -> Problem:
    workload = Workload(spec=SIZES["llama3-8b"], seq_len=seq_len, samples=samples)
    return Problem(workload, BOX, options=options)


def recomputed(plan: Plan, text: str) -> Plan:
    return plan.each(lambda stage: replace(stage, recompute=text))


def test_more_ways_are_searched_where_memory_is_short() -> None:
    """A mode that keeps more lets another layout fit, and be faster."""
    usual = search(asked(Options())).best
    problem = asked(Options(mixed_recompute=True))
    best = search(problem).best
    assert best.time.step_s < 0.9 * usual.time.step_s
    assert {stage.recompute for _, _, stage in usual.plan.stages()} == {"full"}
    assert shortages(best.plan, problem) == []
    short = asked(Options(mixed_recompute=True), seq_len=512)
    assert search(short).best.plan == search(replace(short, options=Options())).best.plan


def test_what_orders_need_is_left_to_them() -> None:
    """Behind a slow link more in flight saves more than less recomputed, and wants its memory."""
    card = replace(catalogue()["RTX4090"], memory_gib=24)
    pool = ChipPool(chip=card, num_nodes=2, chips_per_node=1, network_gbit_s=1)
    spec = replace(SIZES["llama2-7b"], num_layers=7)
    usual = Options(in_flight=True, max_ranks=1, max_pipelines=1, leave_idle=False)
    workload = Workload(spec=spec, seq_len=16384, samples=16)
    problem = Problem(workload, ClusterView((pool,)), options=usual)
    mixed = replace(problem, options=replace(usual, mixed_recompute=True))
    assert search(mixed).best.time.step_s <= search(problem).best.time.step_s


@pytest.mark.parametrize("part", [0.92, 0.75, 0.7])
def test_no_other_way_that_fits_is_faster(part: float) -> None:
    """Of two stages, each in every way to write it."""
    options = Options(memory_part=part, max_split=1, schedules=("1f1b",), max_ranks=2)
    whole = recomputed(search(asked(options, seq_len=1024)).best.plan, "full")
    problem = asked(replace(options, mixed_recompute=True), seq_len=8192)
    time, memory = problem.time(whole), problem.memory(whole)
    given = Candidate(name="", plan=whole, cluster=BOX, time=time, memory=memory)
    (found,) = with_least_recompute([given], problem)
    assert found.time.step_s < time.step_s
    assert shortages(found.plan, problem) == []
    bases = ("", "activation", "feed_forward", "attention", "core", "attention+feed_forward")
    (pipeline,) = found.plan.pipelines
    for number, stage in enumerate(pipeline.stages):
        counts = range(1, len(stage.blocks))
        texts = [base or "off" for base in bases]
        texts += [f"{base}+full:{count}".lstrip("+") for base in bases for count in counts]
        for text in texts:
            stages = list(pipeline.stages)
            stages[number] = replace(stage, recompute=text)
            other = replace(found.plan, pipelines=(replace(pipeline, stages=tuple(stages)),))
            if not shortages(other, problem):
                assert problem.time(other).step_s >= found.time.step_s * (1 - 1e-9), text


def test_hosts_keep_what_long_attention_would_make_again() -> None:
    """A million tokens: whole layers again are a quarter of a step, mostly attention; hosts have
    room for what it reads, and links take it there meanwhile."""
    pool = ChipPool(chip=catalogue()["H100-SXM5-80GB"], num_nodes=2, chips_per_node=8)
    pool = replace(pool, network_gbit_s=400, host_gib=2000)
    workload = Workload(spec=SIZES["llama3-8b"], seq_len=1 << 20, samples=4)
    problem = Problem(workload, ClusterView((pool,)), options=Options(mixed_recompute=True))
    found = search(problem)
    (stage,) = found.best.plan.pipelines[0].stages
    assert offloads(stage.recompute, None, "host") and "full" not in stage.recompute
    assert shortages(found.best.plan, problem) == []
    alone = replace(problem, cluster=ClusterView((replace(pool, host_gib=None),)))
    without = search(alone).best
    assert found.best.time.step_s < 0.82 * without.time.step_s
    few = replace(problem, cluster=ClusterView((replace(pool, host_gib=1200),)))
    some = search(few).best
    assert found.best.time.step_s < some.time.step_s < without.time.step_s
    assert shortages(some.plan, few) == []


def test_four_chips_take_no_more_effort_than_there_is() -> None:
    """Few samples are divided in every way, and what lacks memory is looked at again: each of many
    such looks had the effort of one."""
    chips = [catalogue()["H100-SXM5-80GB"], catalogue()["A100-SXM4-80GB"]]
    view = ClusterView(tuple(ChipPool(chip=c, num_nodes=1, chips_per_node=2) for c in chips))
    work = Workload(spec=SIZES["llama3.2-1b"], seq_len=2048, samples=32)
    run = SearchRun(Problem(work, view, options=Options(effort=EFFORT)))
    run.look_everywhere()
    first = run.ledger.effort
    assert first < 200 * EFFORT
    assert run.lacks_memory
    run.look_again()
    assert run.ledger.effort - first < 2 * AGAIN * MOST_AGAIN * EFFORT
    told = sum(each.count for each in run.ledger.pruned.reasons.values())
    assert told + run.ledger.simulated == run.ledger.considered, "all has a reason"


@pytest.mark.parametrize("fits", [True, False])
def test_many_kinds_take_no_more_effort_than_there_is(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six kinds go together in 876 ways and four in 51: all of those that compute most, then others
    as long as there is effort; but where nothing fits so, all."""
    names = ["T4", "RTX4090", "H100-SXM5-80GB", "A100-SXM4-40GB", "MI300X", "L40S"]
    pools = [ChipPool(chip=catalogue()[n], num_nodes=1, chips_per_node=2) for n in names]
    work = Workload(spec=SIZES["llama3.2-1b"], seq_len=2048, samples=32)
    run = SearchRun(Problem(work, ClusterView(tuple(pools)), options=Options(effort=EFFORT)))
    looked: list[Arrangement] = []

    def look_at(run: SearchRun, each: Arrangement, **_: bool) -> None:
        looked.append(each)
        run.ledger.effort += EFFORT
        run.ledger.best_s = 1.0 if fits else run.cutoff

    monkeypatch.setattr(SearchRun, "look_at", look_at)
    every = list(arrangements(len(pools), run.options))
    run._in_turn(every, brief=True)
    assert len(every) == 876
    inside = [each for each in every if {pool for group in each for pool in group} <= {2, 3, 4, 5}]
    assert MOST_TOGETHER == 4 and len(inside) == 51
    assert looked[:51] == inside
    assert looked[51] == ((0,), (1,), (2,), (3,), (4,), (5,)), "all at once"
    assert len(looked) == (51 + WITH_OTHERS + 1 if fits else 876)
    left = run.ledger.pruned.reasons["limit"].count if fits else 0
    assert len(looked) + left == 876
    assert not fits or {*run.ledger.pruned.reasons["limit"].examples} == {LEFT}

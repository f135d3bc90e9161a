"""The search against every plan there is, one by one, on clusters small enough for that."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.every_plan import CASES, WITHOUT_LIMIT, Best, Case, brute_force, cuts, fits, pool
from weft.cluster.view import ChipPool, ClusterView
from weft.models.llama.sizes import SIZES
from weft.plan.plan import Plan
from weft.planner.explain import what_domains_save
from weft.planner.forecast import forecast
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import Candidate, Found, NoPlan, search
from weft.planner.search.search import cut_in_two
from weft.planner.search.verdict import lines_of
from weft.planner.validate import validate_plan
from weft.simulate.step import time_of_plan

H100, A100 = "H100-SXM5-80GB", "A100-SXM4-80GB"
SPEC = replace(SIZES["llama2-7b"], num_layers=4)
SEQ = 2048


FASTEST: dict[str, Best] = {}
"""Filled on demand."""


def fastest(case: Case) -> Best:
    """By brute force, which takes long, once for all tests."""
    if repr(case) not in FASTEST:
        FASTEST[repr(case)] = brute_force(case)
    return replace(FASTEST[repr(case)])


def found(cluster: ClusterView, samples: int, **options) -> Found:
    chosen = Options(effort=WITHOUT_LIMIT, **options)
    return search(
        Problem(Workload(spec=SPEC, seq_len=SEQ, samples=samples), cluster, options=chosen)
    )


def is_cut(best: Candidate) -> bool:
    """One kind of chip is in two places."""
    kinds = [part.chip.name for part in best.cluster.pools]
    return len(set(kinds)) < len(kinds)


def check(case: Case) -> Found | None:
    """What is found is the fastest there is, fits, and works."""
    expected = fastest(case).seconds
    problem = Problem(case.workload, case.cluster, options=case.options)
    if expected == inf:
        with pytest.raises(NoPlan):
            search(problem)
        return None
    result = search(problem)
    best, spec = result.best, case.workload.spec
    several = len({part.chip.name for part in case.pools}) == len(case.pools)
    if several and is_cut(best):  # brute force lists these for a case of its own
        assert best.time.step_s < expected
    else:
        assert best.time.step_s == pytest.approx(expected, rel=1e-9)
    assert result.bound_s <= best.time.step_s * (1 + 1e-9), "nothing can beat the bound"
    validate_plan(best.plan, num_layers=case.num_layers, global_batch=case.samples)
    assert fits(best.plan, spec, best.cluster, case.seq_len, ranks=best.cluster.world_size)
    return result


FEWER = {"two-and-two": 3, "three-kinds": 4, "side-by-side": 5, "short-side-by-side": 5,
         "slow-links": 2}  # fmt: skip
"""Samples with which shares still differ: with three of three kinds they may be alike, and a search
that knows no other shares loses nothing. At slow links one chip alone is the best of all."""


MANY_PLANS = {"one-line", "odd-layers", "two-and-two", "three-kinds"}
"""Cases of which two schedules are enough to list: other cases have them all."""


def few(name: str) -> Case:
    case = CASES[name]
    schedules = 2 if name in MANY_PLANS else case.num_schedules
    return replace(case, samples=FEWER.get(name, case.samples), num_schedules=schedules)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("six-chips")])
def test_no_plan_is_faster_than_what_is_found(name: str) -> None:
    """Alone and side by side with any shares, where memory binds and where links do."""
    assert check(few(name)) is not None


def test_cases_hold_what_they_are_for() -> None:
    """Some best plans are pipelines side by side of unlike shares, some go through unlike chips."""
    best = search(Problem(CASES["three-kinds"].workload, CASES["three-kinds"].cluster)).best
    first, second = best.plan.pipelines
    assert first.samples != second.samples
    best = search(Problem(CASES["odd-layers"].workload, CASES["odd-layers"].cluster)).best
    assert len(best.plan.pipelines) == 1 and len(best.cluster.pools) == 2


@pytest.mark.parametrize(
    ("name", "domains"),
    [("two-nodes", 2), ("short-nodes", 0), ("two-pools", 2), ("short-pools", 0)],
)
def test_domains_where_they_save_time_and_have_room(name: str, domains: int) -> None:
    """Sharing among all needs less memory, but for that sums inside a node come first."""
    case = CASES[name]
    problem = Problem(case.workload, case.cluster, options=case.options)
    found = search(problem).best
    assert len(found.plan.domains) == domains
    assert len(found.plan.pipelines) == (2 if "pools" in name else 1)
    (line, *_) = lines_of(found.plan, found.cluster)
    assert line.apart == {"two-nodes": "nodes", "two-pools": "pipelines"}.get(name, "")
    cast = forecast(found.plan, problem.on(found.cluster))
    assert ("as one would" in what_domains_save(cast)) == bool(domains)
    roomy = search(problem.with_memory(4)).best
    assert len(roomy.plan.domains) == 2, "with more memory every case has domains"


def test_families_apart_in_stages_or_side_by_side() -> None:
    """Over a slow network one hands on activations to the other; over a fast one they sum."""

    def chosen(gbit: float) -> Plan:
        pools = pool(H100, 80, 4, gbit=gbit), pool(A100, 80, 4, gbit=gbit)
        options = Options(domains=True, leave_idle=False, max_split=1, schedules=("1f1b",))
        workload = Workload(spec=replace(SPEC, num_layers=8), seq_len=2048, samples=32)
        return search(Problem(workload, ClusterView(pools), options=options)).best.plan

    slow, fast = chosen(10), chosen(200)
    assert len(slow.pipelines) == 1 and not slow.domains
    assert len(slow.pipelines[0].stages) > 1
    assert len(fast.pipelines) == len(fast.domains) == 2


def test_a_pool_in_two_parts_where_memory_is_short() -> None:
    """The best has one chip of a kind at each end of a pipeline, and is the best there is."""
    case = replace(CASES["small-memory"], samples=2)
    best = fastest(case)
    whole = best.seconds
    for other in cuts(case):
        brute_force(other, best)
    found = search(Problem(case.workload, case.cluster, options=Options(effort=WITHOUT_LIMIT))).best
    assert is_cut(found) and len(found.plan.pipelines) == 1
    assert found.time.step_s == pytest.approx(best.seconds, rel=1e-9)
    assert best.seconds < 0.98 * whole


def test_only_small_clusters_of_several_kinds_are_cut() -> None:
    small = ClusterView((pool(H100, 80, 2), pool(A100, 80, 1, nodes=2)))
    halves = list(cut_in_two(small))
    assert [number for _, number in halves] == [0, 1]
    assert [[p.num_chips for p in view.pools] for view, _ in halves] == [[1, 1, 2], [2, 1, 1]]
    assert halves[0][0].share_a_node((0, 1)) and not halves[1][0].share_a_node((2, 3))
    assert not list(cut_in_two(ClusterView((pool(H100, 80, 3), pool(A100, 80, 2)))))
    assert not list(cut_in_two(ClusterView((pool(H100, 80, 2),))))


def test_the_list_of_plans_is_what_it_seems() -> None:
    """The plan that brute force calls best takes as long as it says, on its own."""
    case = few("side-by-side")
    best = fastest(case)
    assert best.plan is not None and best.used is not None
    time = time_of_plan(best.plan, case.workload.spec, best.used, seq_len=case.seq_len)
    assert time.step_s == pytest.approx(best.seconds, rel=1e-12)
    assert best.plans > best.timed > 3000
    validate_plan(best.plan, num_layers=case.num_layers, global_batch=case.samples)


def test_plans_are_counted_by_hand() -> None:
    """One chip, two layers, three samples: microbatches of 1, 2 and 3, each recomputed or not."""
    best = brute_force(Case(pools=(pool("H100-SXM5-80GB", 80, 1),), num_layers=2, samples=3))
    assert (best.timed, best.plans) == (6, 6)
    two = brute_force(Case(pools=(pool("H100-SXM5-80GB", 80, 1, 2),), num_layers=1, samples=2))
    # As alone: 2 x 2; dp 2 for both at once: 2 x 4 levels; pp 2: 2 x 2 x 6 schedules x 2 splits.
    assert two.timed == 4 + 8 + 48


@pytest.mark.parametrize(
    ("pools", "samples"),
    [
        pytest.param((pool(H100, 24, 4),), 4, id="one kind"),
        pytest.param((pool(H100, 7.5, 4),), 4, id="short of memory"),
        pytest.param((pool(H100, 24, 2, nodes=2),), 3, id="two nodes"),
        pytest.param((pool(H100, 16, 1), pool(A100, 20, 1)), 3, id="two kinds"),
        pytest.param((pool(H100, 14, 1), pool(A100, 8, 2)), 2, id="one is small"),
    ],
)
def test_nothing_is_faster_than_what_is_found(pools: tuple[ChipPool, ...], samples: int) -> None:
    check(Case(pools=pools, num_layers=4, samples=samples))


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    gib=st.tuples(st.floats(4, 26), st.floats(4, 26)),
    chips=st.sampled_from([(1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (2, 1), (1, 2)]),
    samples=st.integers(1, 3),
)
def test_random_clusters_lose_nothing(gib, chips, samples) -> None:
    pools = [pool(chip, g, n) for chip, g, n in zip((H100, A100), gib, chips, strict=True) if n]
    check(Case(pools=tuple(pools), num_layers=4, samples=samples))


def test_every_candidate_was_simulated_or_has_a_reason() -> None:
    result = found(ClusterView((pool(H100, 9, 2), pool(A100, 12, 2))), 3)
    assert result.considered == result.simulated + result.pruned.total
    assert all(reason.examples for reason in result.pruned.reasons.values())
    assert {"memory", "bound", "shape"} <= set(result.pruned.reasons)


@pytest.mark.usefixtures("hurried")
def test_the_same_search_finds_the_same() -> None:
    cluster = ClusterView((pool(H100, 24, 2), pool(A100, 24, 2)))
    workload = Workload(spec=SPEC, seq_len=SEQ, samples=4)
    first, second = search(Problem(workload, cluster)), search(Problem(workload, cluster))
    assert [c.plan for c in (first.best, *first.others)] == [
        c.plan for c in (second.best, *second.others)
    ]


def test_layers_go_by_speed() -> None:
    cluster = ClusterView((pool(H100, 40, 1), pool(A100, 40, 1)))
    spec = replace(SPEC, num_layers=12)
    options = Options(schedules=("1f1b",), leave_idle=False)
    workload = Workload(spec=spec, seq_len=SEQ, samples=16)
    result = search(Problem(workload, cluster, options=options))
    assert result.best.cluster.world_size == 2
    mixed = next(c for c in (result.best, *result.others) if len(c.plan.pipelines) == 1)
    layers = {
        mixed.cluster.pool_of(stage.mesh.ranks[0]).chip.name: stage.layers[1] - stage.layers[0]
        for _, _, stage in mixed.plan.stages()
    }
    assert layers["H100-SXM5-80GB"] > 1.5 * layers["A100-SXM4-80GB"]


@pytest.mark.parametrize(("gib", "level"), [(40, 2), (25, 2), (20, 3)])
def test_zero_shares_what_memory_demands(gib: float, level: int) -> None:
    """Level 2 costs no time, so that it is taken at once; level 3 does, and is taken last."""
    lean = Options(max_split=1, max_stages=1, leave_idle=False, recompute=("full",))
    workload = Workload(spec=replace(SPEC, num_layers=16), seq_len=SEQ, samples=4)
    best = search(Problem(workload, ClusterView((pool(H100, gib, 4),)), options=lean)).best
    assert {stage.zero for _, _, stage in best.plan.stages()} == {level}

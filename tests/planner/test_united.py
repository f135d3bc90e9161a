"""Unlike chips as one mesh: shares of samples and state, against every way to divide them."""

from dataclasses import replace
from itertools import product
from math import inf

import pytest

from benchmarks.every_plan import pool
from weft.cluster.view import ClusterView
from weft.models.llama.sizes import SIZES
from weft.plan.plan import Plan
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import NoPlan, search
from weft.planner.search.domains import have_room
from weft.planner.search.united import filled, united
from weft.planner.validate import refuse_idle_zero, validate_plan

H100, A100 = "H100-SXM5-80GB", "A100-SXM4-80GB"


def problem(gib: tuple[float, float], samples: int, **options: object) -> Problem:
    """A fast chip and a slow one on a node, and 12 layers of Llama 2 7B."""
    spec = replace(SIZES["llama2-7b"], num_layers=12)
    pools = (pool(H100, gib[0], 1, gbit=400), pool(A100, gib[1], 1, gbit=400))
    view = ClusterView(tuple(replace(each, node="one") for each in pools))
    usual = Options(schedules=("1f1b",), mixed_recompute=True)
    workload = Workload(spec=spec, seq_len=4096, samples=samples)
    return Problem(workload, view, options=replace(usual, **options))  # type: ignore[arg-type]


def test_a_fast_chip_with_a_third_of_the_memory() -> None:
    """State goes to the slow chip, and with it work that only memory had kept from the fast one."""
    asked = problem((26, 80), 16)
    before = search(asked).best
    best = search(replace(asked, options=replace(asked.options, unlike_meshes=True))).best
    assert best.time.step_s < before.time.step_s / 1.45
    ((_, _, stage),) = best.plan.stages()
    assert stage.sample_shares[0] > stage.sample_shares[1]
    assert stage.state_shares[0] < stage.state_shares[1] / 5
    validate_plan(best.plan, num_layers=12, global_batch=16)
    refuse_idle_zero(best.plan, tied=False)
    roomy = problem((800, 800), 16)
    more = replace(roomy, options=replace(roomy.options, unlike_meshes=True))
    every = search(more).best.plan.stages()
    assert not any(s.sample_shares for _, _, s in every), "it is looked for where memory lacks"


def test_where_nothing_else_fits() -> None:
    """Neither chip, nor a pipeline through both."""
    asked = problem((11, 38), 2, unlike_meshes=True)
    spec = replace(asked.workload.spec, num_layers=4, vocab_size=128_000)
    asked = replace(asked, workload=replace(asked.workload, spec=spec, seq_len=1024))
    with pytest.raises(NoPlan):
        search(
            replace(asked, options=replace(asked.options, unlike_meshes=False, tiers=("device",)))
        )
    best = search(asked).best
    assert len(best.plan.pipelines[0].stages[0].mesh.ranks) == 2
    assert have_room(best.plan, asked, best.memory)


@pytest.mark.parametrize("gib", [(26, 80), (22, 40)])
def test_no_other_way_to_divide_is_faster(gib: tuple[float, float]) -> None:
    """All samples of each microbatch each way, state by hundredths, at every level."""
    asked = problem(gib, 4, mixed_recompute=False)
    found = united(asked)
    assert found is not None
    ((_, _, stage),) = found.plan.stages()
    best = inf
    for micro, zero, recompute in product((1, 2, 4), (1, 2, 3), ("off", "full")):
        for mine, state in product(range(micro + 1), range(0, 101, 5)):
            shares = {"sample_shares": (mine, micro - mine), "state_shares": (state, 100 - state)}
            other = replace(stage, zero=zero, recompute=recompute, **shares)
            line = replace(found.plan.pipelines[0], stages=(other,), microbatch=micro)
            plan = Plan(num_layers=12, pipelines=(line,))
            seconds = asked.time(plan).step_s
            if seconds < best and have_room(plan, asked, asked.memory(plan)):
                best = seconds
    assert found.time.step_s <= best * 1.01


def test_state_goes_where_it_is_fast_as_far_as_there_is_room() -> None:
    assert filled([3, 1], [1, 1]) == [0.75, 0.25]
    assert filled([3, 1], [0.5, 1]) == [0.5, 0.5]
    assert filled([3, 1, 1], [0.2, 0.3, 1]) == pytest.approx([0.2, 0.3, 0.5])
    assert filled([1, 1], [0.4, 0.5]) is None
    assert filled([1, 1], [-1, 2]) == [0, 1]

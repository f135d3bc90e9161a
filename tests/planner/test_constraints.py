"""What the search is told beforehand: which chips go together, and in what shape."""

from collections.abc import Callable
from math import inf

import pytest

from benchmarks.every_plan import CASES, WITHOUT_LIMIT, Case, every_pipeline, fits
from weft.config.axes import SEARCHED
from weft.plan.plan import Plan, StagePlan
from weft.planner.problem import Options, Problem, Shape
from weft.planner.search import Candidate, Found, NoPlan, search
from weft.simulate.step import time_of_plan

ALONE = dict.fromkeys(SEARCHED, 1)
ODD = CASES["odd-layers"]
"""One chip of a kind and two of another."""


def asked(case: Case, **options) -> Found:
    chosen = Options(effort=WITHOUT_LIMIT, leave_idle=False, **options)
    return search(Problem(case.workload, case.cluster, options=chosen))


def fastest(case: Case, allowed: Callable[[Plan], bool]) -> float:
    """Of every single pipeline over all chips that is allowed."""
    spec, best = case.workload.spec, inf
    for plan, used in every_pipeline(case.pools, case.num_layers, case.samples, shared=False):
        everyone = used.world_size == case.cluster.world_size
        if everyone and allowed(plan) and fits(plan, spec, used, case.seq_len, used.world_size):
            time = time_of_plan(plan, spec, used, seq_len=case.seq_len)
            best = min(best, time.step_s)
    return best


def shape_of(candidate: Candidate, pipeline: int) -> Shape:
    """Of a pipeline of one section."""
    plan = candidate.plan.pipelines[pipeline]
    first: StagePlan = plan.stages[0]
    return Shape(
        axes=dict(first.mesh.axes),
        meshes=len(plan.positions()),
        micro=plan.microbatch,
        recompute=first.recompute,
    )


def test_one_pipeline_with_a_chip_for_each_mesh() -> None:
    found = asked(ODD, max_pipelines=1, max_ranks=1)
    (pipeline,) = found.best.plan.pipelines
    assert [len(stage.mesh.ranks) for stage in pipeline.stages] == [1, 1, 1]
    expected = fastest(
        ODD, lambda plan: all(len(stage.mesh.ranks) == 1 for _, _, stage in plan.stages())
    )
    assert found.best.time.step_s <= expected * (1 + 1e-9)
    free = asked(ODD).best.time.step_s
    assert free < found.best.time.step_s, "the constraint costs something here"


def test_one_pipeline_with_a_mesh_for_each_kind() -> None:
    found = asked(ODD, max_pipelines=1, max_stages=2)
    assert len(found.best.plan.pipelines[0].positions()) == 2
    expected = fastest(ODD, lambda plan: len(plan.pipelines[0].positions()) == 2)
    assert found.best.time.step_s == pytest.approx(expected, rel=1e-9)


def test_no_pipeline_goes_through_unlike_chips() -> None:
    case = CASES["two-and-two"]
    for found in (asked(case, unlike_stages=False), asked(case, max_stages=1)):
        for candidate in (found.best, *found.others):
            for pipeline in candidate.plan.pipelines:
                ranks = {rank for stage in pipeline.stages for rank in stage.mesh.ranks}
                assert len({candidate.cluster.pool_of(rank).chip.name for rank in ranks}) == 1


def test_chips_keep_the_shape_they_are_given() -> None:
    """Another than the best, for all pools and for one; the samples are still shared out."""
    case = CASES["side-by-side"]
    free = asked(case, unlike_stages=False).best
    names = [pool.chip.name for pool in case.pools]
    given = Shape(axes={**ALONE, "tp": 2}, meshes=1, micro=2, recompute="full")
    assert given not in [shape_of(free, number) for number in (0, 1)]
    pinned = asked(case, unlike_stages=False, shapes={names[1]: (given,)}).best
    assert shape_of(pinned, 1) == given
    assert sum(pipeline.samples for pipeline in pinned.plan.pipelines) == case.samples
    assert pinned.time.step_s > free.time.step_s
    both = {name: (shape_of(free, number),) for number, name in enumerate(names)}
    assert asked(case, unlike_stages=False, shapes=both).best.plan == free.plan


def test_a_shape_that_does_not_fill_the_chips_is_no_plan() -> None:
    four = Shape(axes={**ALONE, "dp": 2}, meshes=2, micro=2, recompute="off")
    name = ODD.pools[1].chip.name
    with pytest.raises(NoPlan, match="can be laid over"):
        asked(ODD, shapes={name: (four,)})

"""Experts kept on hosts by the search: the best of all plans there are, where that is needed, and
where it is faster."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf

import pytest
from planner.test_experts_found import H100, SAMPLES, SEQ_LEN, SPEC, divided, ways_to_send

from benchmarks.every_plan import WITHOUT_LIMIT, every_pipeline, pool
from weft.cluster.view import ChipPool, ClusterView
from weft.cost.work import ALL_BY_ADAMW
from weft.plan.plan import Plan
from weft.planner.fit import shortages
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import search
from weft.planner.search.found import NoPlan
from weft.planner.validate import validate_plan

WORKLOAD = Workload(spec=SPEC, seq_len=SEQ_LEN, samples=SAMPLES)
BOTH = ("device", "host")


def on(*pools: ChipPool) -> Problem:
    options = Options(effort=WITHOUT_LIMIT, expert_tiers=BOTH)
    return Problem(WORKLOAD, ClusterView(pools), options=options)


def kept(plan: Plan) -> Iterator[Plan]:
    """The plan, and it with the experts of each mesh, or of all, on hosts, with as many layers of
    them at a time as there are."""
    meshes = [*dict.fromkeys(stage.mesh.ranks for _, _, stage in plan.stages())]
    for tiers in product(BOTH, repeat=len(meshes)):
        chosen = dict(zip(meshes, tiers, strict=True))
        yield plan.each(lambda s, of=chosen: replace(s, expert_tier=of[s.mesh.ranks]))


def best_of_all(problem: Problem) -> tuple[float, set[str]]:
    """Seconds of the fastest, and where its experts are."""
    best, where = inf, set[str]()
    for one, used in every_pipeline(problem.cluster.pools, SPEC.num_layers, SAMPLES, shared=False):
        here = problem.on(used)
        for plan in (way for each in divided(one) for more in kept(each) for way in [more]):
            if not shortages(plan, here):
                step_s = min(here.time(way).step_s for way in ways_to_send(plan))
                if step_s < best:
                    best = step_s
                    where = {stage.expert_tier for _, _, stage in plan.stages()}
    return best, where


CASES = {
    "all fit": ((pool(H100, 80, 2),), {"device"}),
    "none fits on devices": ((pool(H100, 16, 2),), {"host"}),
    "less still": ((pool(H100, 12, 2),), {"host"}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_found_is_the_fastest_of_all(name: str) -> None:
    pools, tiers = CASES[name]
    problem = on(*pools)
    found = search(problem)
    best, where = best_of_all(problem)
    assert found.best.time.step_s <= best * (1 + 1e-9)
    assert {stage.expert_tier for _, _, stage in found.best.plan.stages()} == where == tiers
    assert 0 < found.bound_s <= best * (1 + 1e-9)
    validate_plan(found.best.plan, num_layers=SPEC.num_layers, global_batch=SAMPLES)
    assert not shortages(found.best.plan, problem.on(found.best.cluster))


def test_hosts_without_room_keep_none() -> None:
    with pytest.raises(NoPlan, match="room for experts in the memory of its nodes"):
        search(on(replace(pool(H100, 16, 2), host_gib=None)))


def test_an_optimizer_of_whole_tensors_keeps_them_on_devices() -> None:
    whole = replace(WORKLOAD, training=replace(ALL_BY_ADAMW, by_element=False))
    with pytest.raises(NoPlan):
        search(replace(on(pool(H100, 16, 2)), workload=whole))


def test_the_longer_the_way_the_fewer_are_kept_far() -> None:
    """Layers that stay cost no way; and a step with experts elsewhere is never faster."""
    (one,) = CASES["none fits on devices"][0]
    best = search(on(one)).best
    problem = on(replace(one, chip=replace(one.chip, memory_gib=1000))).on(best.cluster)

    def seconds(plan: Plan) -> float:
        return problem.time(plan).step_s

    far = best.plan.each(lambda stage: replace(stage, expert_layers=2))
    near = best.plan.each(lambda stage: replace(stage, expert_tier="device", expert_layers=2))
    assert seconds(near) < seconds(best.plan) <= seconds(far)

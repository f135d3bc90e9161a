"""What pooling unlike chips makes possible that neither kind can do alone."""

from dataclasses import replace

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.models.llama.sizes import SIZES
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import Found, search

SPEC = replace(SIZES["llama2-7b"], num_layers=8)
FAST, SLOW = catalogue()["H100-SXM5-80GB"], catalogue()["A100-SXM4-80GB"]


def pool(chip, gib: float, nodes: int) -> ChipPool:
    return ChipPool(chip=replace(chip, memory_gib=gib), num_nodes=nodes, chips_per_node=1)


def plan_for(*pools: ChipPool) -> Found:
    workload = Workload(spec=SPEC, seq_len=2048, samples=16)
    options = Options(leave_idle=False, schedules=("1f1b", "zb-h1"))
    return search(Problem(workload, ClusterView(pools), options=options))


def recomputes(found: Found) -> set[str]:
    return {stage.recompute for _, _, stage in found.best.plan.stages()}


def test_together_nobody_recomputes_though_each_kind_alone_must() -> None:
    """The gain of planning anew: the mix is faster than its parts side by side could be."""
    fast, slow = pool(FAST, 20.5, 2), pool(SLOW, 20.5, 2)
    alone = [plan_for(fast), plan_for(slow)]
    mixed = plan_for(fast, slow)
    assert [recomputes(found) for found in alone] == [{"full"}, {"full"}]
    assert recomputes(mixed) == {"off"}
    sum_of_parts = sum(1 / found.best.time.step_s for found in alone)
    assert 1 / mixed.best.time.step_s > sum_of_parts


def test_a_chip_with_little_memory_takes_what_fits_and_no_more() -> None:
    """Two chips of one speed: by speed alone both would hold as many layers."""
    found = plan_for(pool(FAST, 80, 1), pool(FAST, 16, 1))
    layers = {80: 0, 16: 0}
    for _, _, stage in found.best.plan.stages():
        chip = found.best.cluster.pool_of(stage.mesh.ranks[0]).chip
        layers[chip.memory_gib] += stage.layers[1] - stage.layers[0]
    assert 0 < layers[16] < layers[80]
    for rank, memory in found.best.memory.items():
        assert memory.total <= 0.92 * 2**30 * found.best.cluster.pool_of(rank).chip.memory_gib

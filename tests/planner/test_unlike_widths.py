"""Unlike chips that divide widths: against every way to divide them, and by what must follow."""

from dataclasses import replace
from itertools import product
from math import inf

import pytest

from benchmarks.every_plan import pool
from weft.cluster.view import ClusterView
from weft.models.llama.sizes import SIZES
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import NoPlan, search
from weft.planner.search.domains import have_room
from weft.planner.search.unlike_widths import unlike_widths
from weft.planner.search.verdict import verdict
from weft.planner.validate import validate_plan

MODEL = replace(SIZES["llama3-8b"], num_layers=8)
PARTS, SAMPLES = 8, 4
H100, A100 = "H100-SXM5-80GB", "A100-SXM4-80GB"


def problem(gib: tuple[float, float], nodes: int = 1, **options: object) -> Problem:
    """Machines of a fast chip and a slow one each, and few samples for them."""
    one = [pool(H100, gib[0], 1, gbit=100), pool(A100, gib[1], 1, gbit=100)]
    pools = (replace(each, node=f"node {n}") for n in range(nodes) for each in one)
    work = Workload(spec=MODEL, seq_len=2048, samples=SAMPLES)
    usual = Options(unlike_meshes=True)
    return Problem(work, ClusterView(tuple(pools)), options=replace(usual, **options))  # type: ignore[arg-type]


def plan(shares: tuple[int, int], micro: int = 1, recompute: str = "off") -> Plan:
    stage = StagePlan(
        mesh=Mesh.of(range(2), tp=2).with_shares(tp=shares),
        layers=(0, MODEL.num_layers),
        device="cuda",
        precision="bf16",
        recompute=recompute,
    )
    line = PipelinePlan(stages=(stage,), samples=SAMPLES, microbatch=micro)
    return Plan(num_layers=MODEL.num_layers, pipelines=(line,))


@pytest.mark.parametrize("gib", [(800, 800), (40, 24), (22, 38)])
def test_parts_go_as_is_fastest_of_all_ways(gib: tuple[float, float]) -> None:
    """Where memory is short, too: then the fast chip has less than its speed says."""
    asked, best, chosen = problem(gib), inf, (0, 0)
    for first, micro, recompute in product(range(1, PARTS), (1, 2, 4), ("off", "full")):
        one = plan((first, PARTS - first), micro, recompute)
        step_s = asked.time(one).step_s
        if step_s < best and have_room(one, asked, asked.memory(one)):
            best, chosen = step_s, (first, PARTS - first)
    found = unlike_widths(asked)
    assert found is not None and found.time.step_s <= best * (1 + 1e-9)
    (stage,) = (stage for _, _, stage in found.plan.stages())
    parts = {
        asked.cluster.pool_of(r).chip.name: n
        for r, n in zip(stage.mesh.ranks, stage.mesh.shares("tp"), strict=True)
    }
    assert tuple(parts.values()) in (chosen, chosen[::-1]) and sum(parts.values()) == PARTS
    assert (parts[H100] > parts[A100]) == (gib[0] >= gib[1])


def test_the_search_takes_what_is_faster_than_all_others() -> None:
    """Few samples keep no pipeline busy; many do, and nobody waits for a sum."""
    asked = problem((800, 800))
    before = search(replace(asked, options=replace(asked.options, unlike_meshes=False)))
    after = search(asked)
    assert after.best.time.step_s < before.best.time.step_s / 1.03
    assert after.bound_s <= after.best.time.step_s
    (stage,) = (stage for _, _, stage in after.best.plan.stages())
    assert stage.mesh.shares("tp") and Plan.from_json(after.best.plan.to_json()) == after.best.plan
    validate_plan(after.best.plan, num_layers=MODEL.num_layers, global_batch=SAMPLES)
    reason = verdict(plan((6, 2)), asked, best_s=after.best.time.step_s)
    assert reason.kind == "shape" and "unlike parts" in reason.words


def test_each_mesh_stays_in_its_machine() -> None:
    """Two of them, whose samples or layers are others."""
    asked = problem((800, 800), nodes=2)
    found = unlike_widths(asked)
    assert found is not None
    for _, _, stage in found.plan.stages():
        for group in stage.mesh.groups("tp"):
            assert asked.cluster.share_a_node(group)
            assert len({asked.cluster.pool_of(rank).chip.name for rank in group}) == 2


def test_a_machine_of_several_pools_is_one_machine() -> None:
    """Two pools of one chip each, in one node, are a pool of two: no message takes the network."""
    one = ClusterView((pool(H100, 800, 2, gbit=1),))
    halves = tuple(replace(pool(H100, 800, 1, gbit=1), node="here") for _ in range(2))
    work = Workload(spec=MODEL, seq_len=2048, samples=SAMPLES)
    together, apart = (Problem(work, view) for view in (one, ClusterView(halves)))
    even = plan((1, 1))
    assert apart.time(even) == together.time(even)
    alone = even.each(lambda stage: replace(stage, mesh=Mesh.of(range(2), tp=2)))
    assert together.time(even) == together.time(alone) == apart.time(alone)
    assert together.time(plan((3, 1))).step_s > together.time(even).step_s * 1.2


def test_what_goes_from_machine_to_machine_takes_the_network() -> None:
    """Two ranks of two machines, of two chips each: as if they were alone there."""
    asked = problem((800, 800), nodes=2)
    alone = ClusterView(tuple(pool(H100, 800, 1, gbit=100) for _ in range(2)))
    far = plan((1, 1)).each(lambda stage: replace(stage, mesh=replace(stage.mesh, ranks=(0, 2))))
    assert asked.time(far) == replace(asked, cluster=alone).time(plan((1, 1)))


def test_where_nothing_else_fits() -> None:
    """Half of the table is too much for one of them, and all of it for both."""
    asked = problem((34, 22))
    spec = replace(MODEL, num_layers=2, vocab_size=256_000)
    asked = replace(asked, workload=replace(asked.workload, spec=spec, samples=1, seq_len=512))
    with pytest.raises(NoPlan):
        search(replace(asked, options=replace(asked.options, unlike_meshes=False)))
    best = search(asked).best
    assert best.plan.pipelines[0].stages[0].mesh.shares("tp")
    assert have_room(best.plan, asked, best.memory)


def test_borders_are_cast_as_is_asked() -> None:
    """Of one that is as fast with its layers in two meshes; and no more chips divide than may."""
    asked = problem((60, 60), nodes=2, border="fp8", micros=(1,), zero=(0,))
    found = unlike_widths(replace(asked, workload=replace(asked.workload, samples=1)))
    assert found is not None
    first, last = (stage for _, _, stage in found.plan.stages())
    assert (first.border, last.border) == ("fp8", "")
    alone = replace(asked, options=replace(asked.options, max_split=1))
    assert unlike_widths(alone) is None

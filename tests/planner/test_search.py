"""The search against every plan there is, one by one, on clusters small enough for that."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.cost.memory import memory_of_plan
from weft.models.llama.sizes import SIZES
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.options import Options
from weft.planner.search import Found, NoPlan, search
from weft.planner.validate import validate_plan
from weft.planner.workload import Workload
from weft.simulate.step import time_of_plan

H100, A100 = catalogue()["H100-SXM5-80GB"], catalogue()["A100-SXM4-80GB"]
SPEC = replace(SIZES["llama2-7b"], num_layers=4)
SEQ = 2048
SCHEDULES = ("1f1b", "zb-h1", "gpipe", "interleaved", "zb-v", "dualpipe-v")


def pool(chip, gib: float, chips: int, nodes: int = 1) -> ChipPool:
    small = replace(chip, memory_gib=gib)
    return ChipPool(chip=small, num_nodes=nodes, chips_per_node=chips)


def every_split(meshes: int, layers: int) -> Iterator[tuple[int, ...]]:
    """Only the ends of a pipeline may have no layer of their own."""
    for split in product(range(layers + 1), repeat=meshes):
        if sum(split) == layers and all(split[1:-1]):
            yield split


def every_section(part: ChipPool, samples: int) -> Iterator[tuple[int, int, int, ChipPool]]:
    """(tp, dp, meshes, the nodes they fill): as many chips on each of the fewest nodes."""
    total, node = part.num_chips, part.chips_per_node
    for tp, dp, meshes in product(range(1, node + 1), range(1, samples + 1), range(1, 5)):
        chips = tp * dp * meshes
        if node % tp or 32 % tp or chips > total:
            continue
        for nodes in range(1, part.num_nodes + 1):
            if chips <= nodes * node and chips % (nodes * tp) == 0:
                yield tp, dp, meshes, replace(part, num_nodes=nodes, chips_per_node=chips // nodes)
                break


def every_pipeline(cluster: ClusterView, samples: int) -> Iterator[tuple[Plan, ClusterView]]:
    """One pipeline, through any kinds in any order."""
    for number in range(1, len(cluster.pools) + 1):
        for pools in permutations(cluster.pools, number):
            choices = [list(every_section(part, samples)) for part in pools]
            ways = {dp for sections in choices for _, dp, _, _ in sections}
            for sections, micro in product(product(*choices), range(1, samples + 1)):
                each = {micro // dp for dp in ways if micro % dp == 0}
                if not each & {1, 2, 4, 8} or any(dp > micro for _, dp, _, _ in sections):
                    continue
                if number == 1 and micro // sections[0][1] not in (
                    {1, 2, 4, 8} if micro % sections[0][1] == 0 else ()
                ):
                    continue
                if any(
                    dp > 1 and -(-micro // dp) == -(-micro // (dp - 1)) for _, dp, _, _ in sections
                ):
                    continue
                yield from every_way(sections, micro, samples)


def every_way(sections, micro: int, samples: int) -> Iterator[tuple[Plan, ClusterView]]:
    """The schedules, recomputation, ZeRO and layers of a pipeline."""
    used = ClusterView(tuple(part for _, _, _, part in sections))
    settings = [
        [(r, z) for r in ("off", "full") for z in ((0, 1, 2, 3) if dp > 1 else (0,))]
        for _, dp, _, _ in sections
    ]
    many = sum(meshes for _, _, meshes, _ in sections)
    for chosen, schedule in product(product(*settings), SCHEDULES if many > 1 else ("1f1b",)):
        shells, rank = [], 0
        for (tp, dp, meshes, _), (recompute, zero) in zip(sections, chosen, strict=True):
            for _ in range(meshes):
                mesh = Mesh.of(range(rank, rank + tp * dp), dp=dp, tp=tp)
                shells.append({"mesh": mesh, "recompute": recompute, "zero": zero})
                rank = mesh.ranks[-1] + 1
        for split in every_split(many, SPEC.num_layers):
            stages = stages_of(shells, split, schedule)
            pipeline = PipelinePlan(
                stages=stages, samples=samples, microbatch=micro, schedule=schedule
            )
            yield Plan(num_layers=SPEC.num_layers, pipelines=(pipeline,)), used


def stages_of(shells, split: tuple[int, ...], schedule: str) -> tuple[StagePlan, ...]:
    there = list(range(len(shells)))
    parts = [((n + 1) // 2, n // 2) for n in split]
    if schedule in ("zb-v", "dualpipe-v"):
        order = [(m, parts[m][0]) for m in there] + [(m, parts[m][1]) for m in reversed(there)]
    elif schedule == "interleaved":
        order = [(m, parts[m][chunk]) for chunk in (0, 1) for m in there]
    else:
        order = list(zip(there, split, strict=True))
    stages, layer = [], 0
    for mesh, count in order:
        layers = (layer, layer + count)
        stages.append(StagePlan(layers=layers, device="cuda", precision="bf16", **shells[mesh]))
        layer += count
    return tuple(stages)


def fits(plan: Plan, used: ClusterView, part: float = 0.92) -> bool:
    memory = memory_of_plan(plan, SPEC, SEQ)
    return all(
        memory[rank].total <= used.pool_of(rank).chip.memory_gib * 2**30 * part
        for rank in {stage.mesh.ranks[0] for _, _, stage in plan.stages()}
    )


def brute_force(cluster: ClusterView, samples: int) -> tuple[float, int]:
    """The fastest single pipeline, and how many there are."""
    best, number = float("inf"), 0
    for plan, used in every_pipeline(cluster, samples):
        number += 1
        if fits(plan, used):
            best = min(best, time_of_plan(plan, SPEC, used, seq_len=SEQ).step_s)
    return best, number


def found(cluster: ClusterView, samples: int, **options) -> Found:
    chosen = Options(effort=10**12, **options)
    return search(Workload(spec=SPEC, seq_len=SEQ, samples=samples), cluster, options=chosen)


def check(cluster: ClusterView, samples: int) -> None:
    """Nothing is faster than what is found; several pipelines may be faster than any one."""
    expected, _ = brute_force(cluster, samples)
    if expected == float("inf"):
        with pytest.raises(NoPlan):
            found(cluster, samples)
        return
    best = found(cluster, samples).best
    assert best.time.step_s <= expected * (1 + 1e-9)
    validate_plan(best.plan, num_layers=4, global_batch=samples, elsewhere=True)
    assert fits(best.plan, best.cluster)
    if len(best.plan.pipelines) == 1:
        assert best.time.step_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("cluster", "samples"),
    [
        pytest.param(ClusterView((pool(H100, 24, 4),)), 4, id="one kind"),
        pytest.param(ClusterView((pool(H100, 7.5, 4),)), 4, id="short of memory"),
        pytest.param(ClusterView((pool(H100, 24, 2, nodes=2),)), 3, id="two nodes"),
        pytest.param(ClusterView((pool(H100, 16, 1), pool(A100, 20, 1))), 3, id="two kinds"),
        pytest.param(ClusterView((pool(H100, 14, 1), pool(A100, 8, 2))), 2, id="one is small"),
    ],
)
def test_nothing_is_faster_than_what_is_found(cluster: ClusterView, samples: int) -> None:
    check(cluster, samples)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    gib=st.tuples(st.floats(4, 26), st.floats(4, 26)),
    chips=st.sampled_from([(1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (2, 1), (1, 2)]),
    samples=st.integers(1, 3),
)
def test_random_clusters_lose_nothing(gib, chips, samples) -> None:
    pools = [pool(chip, g, n) for chip, g, n in zip((H100, A100), gib, chips, strict=True) if n]
    check(ClusterView(tuple(pools)), samples)


def test_every_candidate_was_simulated_or_has_a_reason() -> None:
    result = found(ClusterView((pool(H100, 9, 4), pool(A100, 12, 2))), 4)
    assert result.considered == result.simulated + result.pruned.total
    assert set(result.pruned.examples) == set(result.pruned.counts)
    assert {"memory", "bound", "shape"} <= set(result.pruned.counts)


def test_the_same_search_finds_the_same() -> None:
    cluster = ClusterView((pool(H100, 24, 4), pool(A100, 24, 4)))
    workload = Workload(spec=SPEC, seq_len=SEQ, samples=8)
    first, second = search(workload, cluster), search(workload, cluster)
    assert [c.plan for c in (first.best, *first.others)] == [
        c.plan for c in (second.best, *second.others)
    ]


def test_layers_go_by_speed() -> None:
    cluster = ClusterView((pool(H100, 40, 1), pool(A100, 40, 1)))
    spec = replace(SPEC, num_layers=12)
    result = search(
        Workload(spec=spec, seq_len=SEQ, samples=16),
        cluster,
        options=Options(schedules=("1f1b",), leave_idle=False),
    )
    assert result.best.cluster.world_size == 2
    mixed = next(c for c in (result.best, *result.others) if len(c.plan.pipelines) == 1)
    layers = {
        mixed.cluster.pool_of(stage.mesh.ranks[0]).chip.name: stage.layers[1] - stage.layers[0]
        for _, _, stage in mixed.plan.stages()
    }
    assert layers["H100-SXM5-80GB"] > 1.5 * layers["A100-SXM4-80GB"]

"""A step of a plan on a cluster, against the closed form and by what must follow from what."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from benchmarks.job import Job, step_seconds_of_job
from weft.cluster.cluster import Dtype, catalogue
from weft.cluster.view import ChipPool, ClusterView, Site
from weft.cost.operators import Op, Phase
from weft.models.llama.sizes import SIZES
from weft.models.registry import shape_of
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.simulate.step import Knowledge, time_of_plan

SPEC = SIZES["llama2-7b"]
SEQ = 2048
H100, A100 = catalogue()["H100-SXM5-80GB"], catalogue()["A100-SXM4-80GB"]
ALIKE = ClusterView((ChipPool(chip=H100, num_nodes=4, chips_per_node=8),))
MIXED = ClusterView(
    (
        ChipPool(chip=H100, num_nodes=1, chips_per_node=8),
        ChipPool(chip=A100, num_nodes=1, chips_per_node=8),
    )
)


def plan(bounds: list[int], *, dp: int, tp: int, samples: int = 64, **stage: object) -> Plan:
    """Stages of ``dp x tp`` ranks each, with layers between neighbouring bounds."""
    size = dp * tp
    options = {"precision": "bf16", "device": "cuda", **stage}
    stages = [
        StagePlan(
            mesh=Mesh.of(range(number * size, (number + 1) * size), dp=dp, tp=tp),
            layers=(low, high),
            **options,
        )
        for number, (low, high) in enumerate(pairwise(bounds))
    ]
    pipeline = PipelinePlan(stages=tuple(stages), samples=samples, microbatch=dp)
    return Plan(num_layers=32, pipelines=(pipeline,))


def seconds(what: Plan, where: ClusterView, **options: object) -> float:
    return time_of_plan(what, SPEC, where, seq_len=SEQ, **options).step_s


@pytest.mark.parametrize(("dp", "tp", "pp"), [(8, 1, 1), (4, 2, 1), (2, 2, 4), (1, 8, 4)])
@pytest.mark.parametrize("zero", [0, 1])
def test_plans_of_like_stages_take_what_their_job_takes(dp, tp, pp, zero) -> None:
    bounds = [32 * p // pp for p in range(pp + 1)]
    planned = seconds(plan(bounds, dp=dp, tp=tp, zero=zero), ALIKE)
    job = Job(shape=shape_of(SPEC), seq_len=SEQ, global_batch=64, dp=dp, tp=tp, pp=pp, zero=zero)
    expected = step_seconds_of_job(job, [Knowledge().hardware_of(ALIKE.pools[0])])
    assert planned == pytest.approx(expected, rel=0.03)


SLOW = {"network_gbit_s": 1.0}, {"host_gb_s": 1.0}, {"chip": replace(H100, link_gb_s=1.0)}


@pytest.mark.parametrize("slow", SLOW, ids=["network", "host", "link"])
def test_the_slowest_pool_of_a_mesh_decides_wherever_it_stands(slow: dict[str, object]) -> None:
    """The first rank of a mesh spoke for all, also for those of the same chip on another pool."""
    tier = "host" if "host_gb_s" in slow else "device"
    whole = plan([0, 32], dp=8, tp=2, zero=1, state_tier=tier)
    usual = ChipPool(chip=H100, num_nodes=1, chips_per_node=8, host_gib=1000.0)
    slower = replace(usual, **slow)
    pairs = (usual, usual), (usual, slower), (slower, usual)
    fast, *mixed = (seconds(whole, ClusterView(pair)) for pair in pairs)
    assert mixed[0] == pytest.approx(mixed[1], rel=1e-9)
    assert mixed[0] > 1.2 * fast


def test_the_slower_chip_should_get_fewer_layers() -> None:
    by_split = {
        first: seconds(plan([0, first, 32], dp=8, tp=1), MIXED) for first in range(12, 30, 2)
    }
    best = min(by_split, key=by_split.__getitem__)
    assert 18 <= best <= 26
    assert by_split[best] < 0.8 * by_split[12]


def test_a_mix_is_slower_than_the_faster_chips_alone() -> None:
    even = plan([0, 16, 32], dp=8, tp=1)
    slow = replace(MIXED, pools=(replace(MIXED.pools[1], num_nodes=2),))
    fast = replace(MIXED, pools=(replace(MIXED.pools[0], num_nodes=2),))
    assert seconds(even, fast) < seconds(even, MIXED) <= seconds(even, slow)


def test_unlike_pipelines_wait_for_the_last() -> None:
    one = plan([0, 32], dp=4, tp=1, samples=32).pipelines[0]
    stage = replace(one.stages[0], mesh=Mesh.of(range(8, 16), dp=8))
    more = replace(one, stages=(stage,), samples=512, microbatch=8)
    both = time_of_plan(Plan(num_layers=32, pipelines=(one, more)), SPEC, MIXED, seq_len=SEQ)
    alone = [timeline.step_s for timeline in both.timelines]
    assert alone[1] > alone[0]
    assert both.step_s == pytest.approx(both.stretch * (alone[1] + both.once_s[1]))
    assert 1 < both.stretch < 1.05


def test_who_only_keeps_updates_when_the_others_have_computed() -> None:
    one = plan([0, 32], dp=8, tp=1, samples=32, zero=1, state_shares=(0,) * 8).pipelines[0]
    stage = replace(one.stages[0], mesh=Mesh.of(range(8, 16), dp=8), state_shares=())
    keeper = replace(one, stages=(stage,), samples=0)
    both = time_of_plan(Plan(num_layers=32, pipelines=(one, keeper)), SPEC, MIXED, seq_len=SEQ)
    worked, kept = both.timelines
    assert (kept.step_s, kept.busy_s) == (0, (0,))
    assert both.once_s[1] > both.once_s[0]
    assert both.step_s == pytest.approx(both.stretch * (worked.step_s + both.once_s[1]))


def test_recomputation_and_level_3_cost_time() -> None:
    base = seconds(plan([0, 32], dp=8, tp=1), ALIKE)
    assert base * 1.2 < seconds(plan([0, 32], dp=8, tp=1, recompute="full"), ALIKE) < base * 1.4
    assert seconds(plan([0, 32], dp=8, tp=1, zero=3), ALIKE) > 1.01 * base


def test_level_2_talks_more_often_than_level_1() -> None:
    """In a pipeline alone; side by side with others it talks once a step, like level 1."""
    once, each = plan([0, 32], dp=8, tp=1, zero=1), plan([0, 32], dp=8, tp=1, zero=2)
    assert seconds(each, ALIKE) > seconds(once, ALIKE)


def test_passes_take_their_turns() -> None:
    base = plan([0, 32], dp=8, tp=1)
    pipeline = replace(base.pipelines[0], microbatch=16)
    cut = replace(pipeline, stages=(replace(pipeline.stages[0], passes=2),))
    whole, parts = (seconds(replace(base, pipelines=(one,)), ALIKE) for one in (pipeline, cut))
    assert whole < parts < 1.1 * whole


def test_pipelines_exchange_gradients_over_the_network() -> None:
    one = plan([0, 32], dp=8, tp=1, samples=64).pipelines[0]
    stage = replace(one.stages[0], mesh=Mesh.of(range(8, 16), dp=8))
    both = Plan(num_layers=32, pipelines=(one, replace(one, stages=(stage,))))
    alone = Plan(num_layers=32, pipelines=(one,))
    single, double = (time_of_plan(p, SPEC, ALIKE, seq_len=SEQ) for p in (alone, both))
    assert double.timelines[0].step_s == single.timelines[0].step_s
    assert double.once_s[0] > 2 * single.once_s[0]


def test_totals_are_summed_over_all_ranks_however_late_they_are() -> None:
    """By gloo 0.8 s, as was measured, where a message comes 0.2 s later; of sites that train for
    themselves, and inside a node, next to nothing."""
    late = ChipPool(chip=H100, num_nodes=2, chips_per_node=1, network_latency_s=0.2)
    host = replace(late, chip=replace(H100, vendor="CPU"))
    assert host.chip.device == "cpu"
    by_host, by_card = (Knowledge().totals_s(ClusterView((pool,))) for pool in (host, late))
    assert (by_host, by_card) == pytest.approx((0.8, 0.4), rel=1e-3)
    inside = ClusterView((replace(late, num_nodes=1, chips_per_node=2),))
    assert Knowledge().totals_s(inside) < 1e-4
    one = plan([0, 32], dp=1, tp=1, samples=2).pipelines[0]
    other = replace(one, stages=(replace(one.stages[0], mesh=Mesh.of((1,))),))
    both = Plan(num_layers=32, pipelines=(one, other))
    alone = Plan(num_layers=32, pipelines=(other,))

    def once_s(what: Plan, latency_s: float) -> float:
        far = [Site(name, 1, gbit_s=1.0, latency_s=latency_s) for name in "ab"]
        pools = (replace(late, num_nodes=1, network_latency_s=0.0, site=site) for site in far)
        return time_of_plan(what, SPEC, ClusterView(tuple(pools)), seq_len=SEQ).once_s[0]

    assert once_s(both, 0.2) - once_s(both, 0.0) > 0.8, "totals, and gradients"
    assert once_s(alone, 0.2) == once_s(alone, 0.0)


@dataclass(frozen=True)
class FromVendor:
    """As fast as its maker says."""

    factor: float

    def seconds(self, op: Op, phase: Phase, dtype: Dtype) -> float:
        del dtype
        return self.factor * op.phase_flops(phase) / 5e14

    def moving_seconds(self, num_bytes: float) -> float:
        return num_bytes / 3e12


def test_a_vendors_own_costs_replace_the_catalogue() -> None:
    blank = replace(H100, name="X1", peak_tflops={}, memory_gb_s=None)
    cluster = ClusterView((ChipPool(chip=blank, num_nodes=1, chips_per_node=8),))
    times = [
        seconds(
            plan([0, 32], dp=8, tp=1),
            cluster,
            knowledge=Knowledge(chips={"X1": FromVendor(factor)}),
        )
        for factor in (1.0, 2.0)
    ]
    assert 1.8 * times[0] < times[1] < 2 * times[0]


def test_products_of_fp32_take_the_rate_of_tf32_where_a_chip_has_it() -> None:
    """And that of all bits where it has none, or is measured: a measurement was with all bits."""
    h100, v100 = (
        [
            Knowledge(tf32=tf32).hardware_of(replace(ALIKE.pools[0], chip=chip)).chip
            for tf32 in (False, True)
        ]
        for chip in (H100, catalogue()["V100-SXM2-32GB"])
    )
    assert v100[0] == v100[1]
    ratio = H100.peak_tflops["tf32"] / H100.peak_tflops["fp32"]
    assert h100[1] == replace(h100[0], fp32_flops_s=h100[0].fp32_flops_s * ratio)
    measured = {H100.name: h100[0]}
    known = Knowledge(chips=measured, tf32=True).hardware_of(ALIKE.pools[0])
    assert known.chip is h100[0]


@pytest.mark.parametrize(
    ("ways", "samples", "micro", "most"),
    [
        (8, 10, 8, [1, 1]),  # one rank has the ninth, another the tenth
        (16, 412, 144, [9, 9, 8]),  # 124 are 7.75 on each
        (8, 44, 16, [2, 2, 2]),  # of the last twelve four ranks have two
        (8, 36, 16, [2, 2, 1]),
    ],
)
def test_a_smaller_last_microbatch_takes_as_long_as_who_has_most(
    ways: int, samples: int, micro: int, most: list[int]
) -> None:
    base = plan([0, 32], dp=ways, tp=1)

    def until_last_backward(samples: int, micro: int) -> float:
        one = replace(base.pipelines[0], samples=samples, microbatch=micro)
        whole = replace(base, pipelines=(one,))
        return time_of_plan(whole, SPEC, ALIKE, seq_len=SEQ).timelines[0].step_s

    expected = sum(until_last_backward(ways * n, ways * n) for n in most)
    assert until_last_backward(samples, micro) == pytest.approx(expected, rel=1e-12)

"""What a plan is said to do: parts that add up, and figures that a hand can check."""

from dataclasses import replace
from math import inf

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.config.errors import ConfigError
from weft.cost.sent import Way
from weft.models.llama.sizes import SIZES
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan, ZeroLevel
from weft.planner.forecast import (
    Forecast,
    forecast,
    memory_by_position,
    peak_flops,
    traffic_joules,
)
from weft.planner.problem import Problem, Workload
from weft.planner.runnable import why_not_run

H100, A100 = catalogue()["H100-SXM5-80GB"], catalogue()["A100-SXM4-80GB"]
SPEC = SIZES["llama2-7b"]
WORKLOAD = Workload(spec=SPEC, seq_len=4096, samples=64)
MIXED = ClusterView(
    (
        ChipPool(chip=H100, num_nodes=1, chips_per_node=8, price_per_hour=3.0),
        ChipPool(chip=A100, num_nodes=1, chips_per_node=8, price_per_hour=1.0),
    )
)


def stages(*each: StagePlan) -> Plan:
    pipeline = PipelinePlan(stages=each, samples=64, microbatch=8)
    return Plan(num_layers=32, pipelines=(pipeline,))


def stage(ranks: range, layers: tuple[int, int], tp: int = 1, zero: ZeroLevel = 1) -> StagePlan:
    mesh = Mesh.of(ranks, dp=len(ranks) // tp, tp=tp)
    return StagePlan(mesh=mesh, layers=layers, precision="bf16", device="cuda", zero=zero)


TWO = stages(stage(range(8), (0, 21)), stage(range(8, 16), (21, 32)))


@pytest.fixture(scope="module")
def two() -> Forecast:
    return forecast(TWO, Problem(WORKLOAD, MIXED))


def test_parts_add_up_to_the_step(two: Forecast) -> None:
    for position in two.positions:
        parts = (
            position.computing_s,
            position.communicating_s,
            position.once_s,
            position.waiting_s,
        )
        assert sum(parts) == pytest.approx(two.step_s)
        assert min(parts) >= 0
        assert 0 < position.by_memory < 0.3, "large products are bound by arithmetic"


@pytest.mark.parametrize("shares", [(), (1,) * 16], ids=["not asked", "asked"])
def test_unlike_chips_of_one_mesh_count_for_themselves(shares: tuple[int, ...]) -> None:
    """Peak, power and time of each rank are its own chip's; a border is as fast as its slowest."""
    mesh = Mesh.of(range(16), dp=16)
    both = StagePlan(
        mesh=mesh, layers=(0, 32), precision="bf16", device="cuda", zero=1, sample_shares=shares
    )
    problem = Problem(replace(WORKLOAD, samples=16), MIXED)
    plan = Plan(num_layers=32, pipelines=(PipelinePlan(stages=(both,), samples=16, microbatch=16),))
    found = forecast(plan, problem)
    (position,) = found.positions
    parts = {chip.name: part for chip, _, part in position.kinds}
    assert parts[A100.name] == 1 and 0.2 < parts[H100.name] < 0.5
    peak = 8 * sum(chip.peak_flops("bf16") or 0 for chip in (H100, A100))
    assert found.mfu == pytest.approx(problem.workload.flops_s(found.step_s) / peak)
    alike = forecast(plan, problem.on(ClusterView((replace(MIXED.pools[1], num_nodes=2),))))
    assert found.energy_j is not None and alike.energy_j is not None
    assert found.step_s == pytest.approx(alike.step_s, rel=0.01)
    assert found.energy_j > alike.energy_j, "a faster chip that waits takes more than that"
    (memory,) = memory_by_position(plan, problem)
    assert position.chips == memory.chips == "8 x H100-SXM5-80GB + 8 x A100-SXM4-80GB"
    assert position.as_json()["chip"] == "H100-SXM5-80GB + A100-SXM4-80GB"


def test_every_chip_of_a_mesh_needs_a_family_to_run() -> None:
    other = catalogue()["Ascend-910B"]
    cluster = ClusterView((MIXED.pools[0], replace(MIXED.pools[1], chip=other)))
    plan = stages(stage(range(16), (0, 32)))
    (why,) = why_not_run(plan, cluster)
    assert why.startswith("Ascend-910B needs a device family 'npu'")
    assert not why_not_run(plan, MIXED)


def test_chips_rows_and_ranks(two: Forecast) -> None:
    assert [p.chip.name for p in two.positions] == [H100.name, A100.name]
    assert len(two.memory_by_rank()) == 16
    assert two.memory_by_rank()[0] == two.positions[0].memory
    assert two.slowest.chip == A100 and two.fullest.chip == H100


def test_mfu_by_the_rule_of_six(two: Forecast) -> None:
    """6 FLOPs a parameter and token, and attention's scores: 12 layers d_model s / 2."""
    parameters = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32_000
    per_token = 6 * parameters + 6 * 32 * 4096 * 4096
    peak = 8 * 989.4e12 + 8 * 312e12
    assert two.mfu == pytest.approx(per_token * 64 * 4096 / (peak * two.step_s), rel=1e-3)
    assert two.tokens_per_s == pytest.approx(64 * 4096 / two.step_s)


def test_price_is_of_all_chips_for_the_step(two: Forecast) -> None:
    assert two.price == pytest.approx(32.0 / 3600 * two.step_s)
    assert two.price_per_million_tokens == pytest.approx(two.price / 64 / 4096 * 1e6)
    free = ClusterView((MIXED.pools[0], replace(MIXED.pools[1], price_per_hour=None)))
    assert forecast(TWO, Problem(WORKLOAD, free)).price is None


def test_energy_of_one_chip_by_hand() -> None:
    """Full power while it computes, 0.35 of it otherwise; it sends nothing."""
    alone = Mesh.of(range(1), dp=1)
    plan = stages(StagePlan(mesh=alone, layers=(0, 32), precision="bf16", device="cuda"))
    found = forecast(plan, Problem(WORKLOAD, ClusterView(MIXED.pools[:1])))
    busy = found.positions[0].computing_s
    assert found.sent == {}
    assert found.energy_j == pytest.approx(700 * (busy + 0.35 * (found.step_s - busy)))
    assert found.positions[0].communicating_s == 0
    unknown = replace(H100, power_w=None)
    cluster = ClusterView((ChipPool(chip=unknown, num_nodes=1, chips_per_node=1),))
    assert forecast(plan, Problem(WORKLOAD, cluster)).energy_j is None


def test_traffic_costs_energy_by_how_far_it_goes() -> None:
    near = forecast(TWO, Problem(WORKLOAD, MIXED))
    apart = ClusterView(tuple(replace(p, num_nodes=8, chips_per_node=1) for p in MIXED.pools))
    far = forecast(TWO, Problem(WORKLOAD, apart))
    assert sum(near.sent.values()) == sum(far.sent.values())
    assert {way.reach for way in far.sent} == {"across"}
    assert {way.reach for way in near.sent} == {"across", "node"}  # activations; the rest


def test_talking_is_what_free_links_save() -> None:
    split = stages(stage(range(8), (0, 21), tp=4), stage(range(8, 16), (21, 32), tp=2))
    found = forecast(split, Problem(WORKLOAD, MIXED))
    assert min(position.communicating_s for position in found.positions) > 0
    silent = forecast(split, Problem(WORKLOAD, MIXED).with_links(inf, inf))
    assert [position.communicating_s for position in silent.positions] == [0, 0]
    assert silent.exchange_s == 0
    for one, other in zip(found.positions, silent.positions, strict=True):
        assert one.computing_s == pytest.approx(other.computing_s)


def test_faster_links_inside_or_between() -> None:
    inside = Problem(WORKLOAD, MIXED).with_links(2.0, 1.0).cluster
    assert inside.pools[0].link_bytes_s == pytest.approx(900e9)
    assert inside.pools[0].network_bytes_s == MIXED.pools[0].network_bytes_s
    between = Problem(WORKLOAD, MIXED).with_links(1.0, 2.0).cluster
    assert between.pools[1].network_bytes_s == pytest.approx(50e9)


def test_peaks() -> None:
    assert peak_flops(H100, "bf16") == 989.4e12
    assert peak_flops(catalogue()["V100-SXM2-16GB"], "bf16") == 125e12  # fp16
    assert peak_flops(H100, "fp32") == 67e12
    with pytest.raises(ConfigError):
        peak_flops(replace(H100, peak_tflops={}), "bf16")


def test_the_slowest_is_of_the_pipeline_that_all_wait_for() -> None:
    pipelines = tuple(
        PipelinePlan(stages=(stage(ranks, (0, 32)),), samples=samples, microbatch=8)
        for ranks, samples in ((range(8), 16), (range(8, 16), 48))
    )
    found = forecast(Plan(num_layers=32, pipelines=pipelines), Problem(WORKLOAD, MIXED))
    assert found.slowest.pipeline == 1 and found.slowest.chip == A100
    assert found.positions[0].waiting_s > found.step_s / 2


def test_the_fullest_is_a_part_of_its_own_chip() -> None:
    small = replace(A100, memory_gib=30.0)
    cluster = ClusterView((MIXED.pools[0], replace(MIXED.pools[1], chip=small)))
    found = forecast(TWO, Problem(WORKLOAD, cluster))
    assert found.fullest.chip == small
    assert found.fullest.memory.total < found.positions[0].memory.total


def test_bytes_between_nodes_cost_more() -> None:
    tera = {Way("gradients", "across"): 1e12, Way("gather seq", "node"): 1e12}
    assert traffic_joules(tera) == pytest.approx(880.0)

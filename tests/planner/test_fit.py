"""Plans that do not fit: what is short, and a change that really does."""

from dataclasses import replace

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.config.errors import ConfigError
from weft.models.llama.sizes import SIZES
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.fit import kept_on_hosts, shortages, smallest_change, without_recompute
from weft.planner.outlook import refuse_too_large
from weft.planner.problem import Options, Problem, Workload

CHIP = catalogue()["A100-SXM4-80GB"]
NODE = ClusterView((ChipPool(chip=CHIP, num_nodes=1, chips_per_node=8),))
WORKLOAD = Workload(spec=SIZES["llama2-7b"], seq_len=4096, samples=64)


def plan(micro: int = 8, dp: int = 8) -> Plan:
    mesh = Mesh.of(range(dp), dp=dp)
    stage = StagePlan(mesh=mesh, layers=(0, 32), precision="bf16", device="cuda")
    pipeline = PipelinePlan(stages=(stage,), samples=64, microbatch=micro)
    return Plan(num_layers=32, pipelines=(pipeline,))


def of(memory_gib: float) -> ClusterView:
    chip = replace(CHIP, memory_gib=memory_gib)
    return ClusterView((replace(NODE.pools[0], chip=chip),))


def test_what_is_short_is_a_subtraction() -> None:
    (short,) = shortages(plan(), Problem(WORKLOAD, NODE))
    assert short.key == "pipelines[0].stages[0]"
    assert short.room_gib == pytest.approx(0.92 * 80)
    assert short.short_gib == pytest.approx(short.need_gib - 73.6)
    need = Problem(WORKLOAD, NODE).memory(plan())[0].total
    assert short.need_gib == pytest.approx(need / 2**30)
    assert shortages(plan(), Problem(WORKLOAD, of(short.need_gib / 0.92 + 0.1))) == []
    assert len(shortages(plan(), Problem(WORKLOAD, of(short.need_gib / 0.92 - 0.1)))) == 1


def test_hosts_have_room_for_what_they_keep() -> None:
    """Each chip's part of its host's memory."""
    kept = plan().each(lambda stage: replace(stage, state_tier="host", recompute="full"))
    usual = Problem(WORKLOAD, NODE).memory(plan())[0].optimizer / 2**30
    for missing_gib, many in ((1.0, 1), (-1.0, 0)):
        host_gib = 8 * (usual - missing_gib) / 0.92
        problem = Problem(WORKLOAD, ClusterView((replace(NODE.pools[0], host_gib=host_gib),)))
        short = [each for each in shortages(kept, problem) if each.on_host]
        assert len(short) == many
        assert all(each.short_gib == pytest.approx(missing_gib) for each in short)


def test_each_host_has_room_for_what_its_own_chips_keep() -> None:
    """The first rank's host spoke for all of a mesh."""
    kept = plan().each(lambda stage: replace(stage, state_tier="host", recompute="full"))
    ample = replace(NODE.pools[0], chips_per_node=4, host_gib=1000)
    none = replace(ample, host_gib=None)
    for pools in ((ample, none), (none, ample)):
        short = [s for s in shortages(kept, Problem(WORKLOAD, ClusterView(pools))) if s.on_host]
        assert [each.room_gib for each in short] == [0.0]


AGAIN = "Compute layers again in backward (activation checkpointing, recompute: full)"


@pytest.mark.parametrize(
    ("memory_gib", "micro", "words"),
    [
        (100, 8, "Divide the optimizer's state (zero: 1)."),
        (160, 16, "Divide the optimizer's state (zero: 1)."),
        (
            40,
            8,
            f"{AGAIN} and divide gradients",
        ),
        (
            24,
            8,
            f"{AGAIN} and divide parameters",
        ),
        (6, 8, "Nothing else alone would do: take chips of 14"),
    ],
)
def test_the_smallest_change(memory_gib: float, micro: int, words: str) -> None:
    assert smallest_change(plan(micro), Problem(WORKLOAD, of(memory_gib))).startswith(words)


def test_a_plan_on_one_chip_cannot_share() -> None:
    assert "chips of" in smallest_change(plan(micro=1, dp=1), Problem(WORKLOAD, of(60)))


def test_hosts_are_a_way_out_where_they_have_room() -> None:
    """For state, and then for parameters too, of which no two ranks bring the same."""
    again = plan().each(lambda stage: replace(stage, recompute="full", zero=3))
    options = Options(tiers=("device", "host"), param_tiers=("device", "host"))

    def told(memory_gib: float, host_gib: float) -> str:
        cluster = ClusterView((replace(of(memory_gib).pools[0], host_gib=host_gib),))
        return smallest_change(again, Problem(WORKLOAD, cluster, options=options))

    there = Problem(WORKLOAD, NODE).memory(again)[0]
    need = (there.total - 0.5 * there.optimizer) / 2**30 / 0.92
    assert (
        told(need, 500.0)
        == "Keep what only updates need in the memory of hosts (state_tier: host)."
    )
    without = (there.total - there.optimizer - 0.5 * there.weights) / 2**30 / 0.92
    assert "parameters in the memory of hosts (state_tier: host, param_tier" in told(without, 500.0)
    assert told(need, 1.0).startswith("Nothing else alone would do: take chips of")


def test_what_is_on_disk_is_in_no_hosts_memory() -> None:
    """Parameters on disk counted there, so that plans which fit were refused for hosts' room."""
    there = Problem(WORKLOAD, NODE)
    apart = plan().each(lambda stage: replace(stage, zero=3, param_tier="disk", state_tier="disk"))
    assert kept_on_hosts(apart, there.memory) == {}
    mixed = apart.each(lambda stage: replace(stage, state_tier="host"))
    usual = apart.each(lambda stage: replace(stage, state_tier="device"))
    held = there.memory(usual)[0]
    state = held.optimizer + held.grads  # which wait with it where parameters come and go
    assert kept_on_hosts(mixed, there.memory)[0] == pytest.approx(state, rel=0.01)
    assert shortages(apart, there) == []


def test_chips_that_are_named_are_large_enough() -> None:
    """Rounded up: a chip of 24 GiB would be told to take one of 24 GiB."""
    for micro in range(1, 9):
        one = plan(micro, dp=1).each(lambda stage: replace(stage, recompute="full"))
        words = smallest_change(one, Problem(WORKLOAD, of(6)))
        gib = int(words.split("chips of ")[1].split()[0])
        assert shortages(one, Problem(WORKLOAD, of(gib))) == []


def test_refused_with_what_is_short() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_too_large(plan(), Problem(WORKLOAD, NODE))
    (short,) = shortages(plan(), Problem(WORKLOAD, NODE))
    assert str(caught.value) == (
        f"pipelines[0].stages[0] = '{short.need_gib:.1f} GiB': expected at most 73.6 GiB a rank, "
        f"92% of a A100-SXM4-80GB; {short.short_gib:.1f} GiB are missing. "
        f"{smallest_change(plan(), Problem(WORKLOAD, NODE))}"
    )
    refuse_too_large(plan(), Problem(WORKLOAD, of(500)))


def test_without_recompute() -> None:
    recomputed = replace(plan().pipelines[0].stages[0], recompute="full")
    pipeline = replace(plan().pipelines[0], stages=(recomputed,))
    assert without_recompute(Plan(num_layers=32, pipelines=(pipeline,))) == plan()


def test_recomputation_alone_where_it_does() -> None:
    one = plan(micro=1, dp=1)
    kept = one.pipelines[0]
    again = replace(kept, stages=(replace(kept.stages[0], recompute="full"),))
    recomputed = Plan(num_layers=32, pipelines=(again,))
    (short,) = shortages(recomputed, Problem(WORKLOAD, of(60)))
    enough = of(short.need_gib / 0.92 + 0.1)
    words = f"{AGAIN}."
    assert smallest_change(one, Problem(WORKLOAD, enough)) == words

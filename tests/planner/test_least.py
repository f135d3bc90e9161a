"""What no plan can beat: never more than what is found, and near it where that is all there is."""

from dataclasses import replace

import pytest

from benchmarks.poorer import AS_COMMANDS
from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.cost.work import Training
from weft.models.llama.sizes import SIZES
from weft.plan.plan import ZeroLevel
from weft.planner.problem import Options, Problem, Shape, Workload
from weft.planner.search import search
from weft.planner.search.choice import Section, mesh_axes
from weft.planner.search.costs import KnownCosts
from weft.planner.search.crossings import Crossings
from weft.planner.search.least import Relaxed
from weft.planner.search.united import united

KINDS = catalogue()


def on(*pools: ChipPool, samples: int = 64) -> Problem:
    workload = Workload(spec=SIZES["llama3.2-1b"], seq_len=2048, samples=samples)
    return Problem(workload, ClusterView(pools), options=AS_COMMANDS)


def pool(chip: str, nodes: int, per_node: int, gbit: float = 400.0) -> ChipPool:
    return ChipPool(chip=KINDS[chip], num_nodes=nodes, chips_per_node=per_node, network_gbit_s=gbit)


@pytest.mark.parametrize(("chips", "most"), [(1, 0.03), (4, 0.15)])
def test_of_few_like_chips_the_bound_is_near_what_is_found(chips: int, most: float) -> None:
    found = search(on(pool("H100-SXM5-80GB", 1, chips)))
    assert found.gap is not None and 0 <= found.gap < most


@pytest.mark.parametrize("samples", [3, 7, 12])
def test_no_number_of_samples_in_a_microbatch_is_faster(samples: int) -> None:
    """Whatever a person asks for: of one mesh the fewest microbatches that there is room for."""
    few = on(pool("A10", 1, 2), samples=samples)
    work = replace(few.workload, seq_len=128, spec=replace(few.workload.spec, num_layers=2))
    found = search(replace(few, workload=work))
    for micro in range(1, samples + 1):
        asked = replace(few.options, micros=(micro,))
        there = search(replace(few, workload=work, options=asked)).best.time.step_s
        assert found.bound_s <= found.best.time.step_s * (1 + 1e-6)
        assert found.best.time.step_s <= there * (1 + 1e-6), micro


def test_nodes_of_two_chips_are_no_slower_than_as_many_of_one() -> None:
    """A rank for each of seven samples leaves a chip of the last node out."""
    two = on(pool("L40S", 4, 2, gbit=400), samples=7)
    spec = SIZES["qwen2.5-0.5b"]
    two = replace(two, workload=replace(two.workload, spec=spec, seq_len=8191))
    (nodes,) = two.cluster.pools
    one = two.on(ClusterView((replace(nodes, num_nodes=8, chips_per_node=1),)))
    found, apart = search(two), search(one)
    assert found.best.plan.world_size == 7
    assert found.bound_s <= found.best.time.step_s <= apart.best.time.step_s * (1 + 1e-9)


def test_chips_bound_a_step_by_what_they_could_do_together() -> None:
    """By hand: rates add up where both have room for everything; embedding and head may all be on
    the kind that is better at them, beside layers."""
    fast, slow = pool("H100-SXM5-80GB", 1, 8), pool("A100-SXM4-80GB", 1, 8)
    relaxed = Relaxed(on(fast, slow))
    known = relaxed.problem.knowledge
    step_s = known.software.step_s
    one, other = (relaxed.least_s([n]) / known.stretch(8) - step_s for n in (0, 1))
    both = relaxed.least_s([0, 1]) / known.stretch(16) - step_s
    added = 1 / (1 / one + 1 / other)
    assert 0.98 * added < both <= added * (1 + 1e-5)


def test_less_of_anything_never_lowers_the_bound() -> None:
    whole = on(pool("H100-SXM5-80GB", 2, 4, 10), pool("L40S", 1, 8, 10))
    least = Relaxed(whole).least_s([0, 1])
    poorer = [
        Relaxed(whole).least_s([0]),
        Relaxed(whole.with_memory(0.3)).least_s([0, 1]),
        Relaxed(whole.with_links(0.1, 0.1)).least_s([0, 1]),
        Relaxed(on(whole.cluster.pools[0], pool("L40S", 1, 4, 10))).least_s([0, 1]),
    ]
    assert least <= min(poorer) * (1 + 1e-9) and max(poorer) > 1.2 * least


def test_kinds_behind_slow_links_are_no_faster_together_than_the_better_one() -> None:
    """By hand, at 1 Gbit/s: 0.54 GB of activations between 16 chips and 16 take 0.27 s, and a fifth
    of the 4.9 GB of gradients, which nothing hides, 0.5 s. The better kind takes less alone."""

    def least(gbit: float, samples: int, *, pipelines: int | None = None) -> tuple[float, float]:
        chips = (pool("H100-SXM5-80GB", 2, 8, gbit), pool("A100-SXM4-80GB", 2, 8, gbit))
        asked = on(*chips, samples=samples)
        options = replace(asked.options, max_pipelines=pipelines)
        relaxed = Relaxed(replace(asked, options=options))
        return relaxed.least_s([0, 1]), min(relaxed.least_s([n]) for n in (0, 1))

    both, one = least(1, 64)
    assert both == pytest.approx(one, rel=1e-5)
    both, one = least(1, 64, pipelines=1)
    assert both == pytest.approx(one, rel=1e-5)
    both, one = least(400, 64)
    assert both < 0.8 * one


@pytest.mark.parametrize("gbit", [1, 10, 400])
def test_unlike_chips_as_one_mesh_sum_inside_their_nodes_first(gbit: float) -> None:
    """A ring leaves a node by the ways out of all its chips, and each carries a part."""
    asked = on(pool("H100-SXM5-80GB", 1, 4, gbit), pool("A100-SXM4-80GB", 1, 4, gbit))
    found = united(asked)
    assert found is not None
    least = Relaxed(asked).of_one_mesh(asked.cluster)
    assert 0.5 * found.time.step_s < least <= found.time.step_s


def test_measured_software_counts_and_not_the_usual() -> None:
    """One that takes next to nothing once a step, where a step takes less than what is usual."""
    chip = pool("H100-SXM5-80GB", 1, 1)
    asked = on(chip, samples=1)
    quick = replace(asked.knowledge.software, step_s=1e-4)
    measured = replace(asked.knowledge.hardware_of(chip), software=quick)
    known = replace(asked.knowledge, hardware={chip.chip.name: measured})
    tiny = replace(asked.workload.spec, num_layers=1, vocab_size=1024)
    workload = replace(asked.workload, spec=tiny, seq_len=64)
    found = search(replace(asked, knowledge=known, workload=workload))
    assert found.best.time.step_s < asked.knowledge.software.step_s
    assert found.gap is not None and found.gap >= 0


@pytest.mark.parametrize("waits", [{"layer_s": 1e-2, "stage_layers": 1.0}, {"host_layer_s": 1e-2}])
def test_what_only_stages_without_ends_take_is_in_no_bound(waits: dict[str, float]) -> None:
    """One stage has both ends, and every layer waits for the host: ends may compute meanwhile."""
    chip = pool("H100-SXM5-80GB", 1, 1)
    asked = on(chip, samples=4)
    software = replace(asked.knowledge.software, **waits)
    measured = replace(asked.knowledge.hardware_of(chip), software=software)
    known = replace(asked.knowledge, hardware={chip.chip.name: measured})
    tiny = replace(asked.workload.spec, num_layers=2, vocab_size=1024)
    workload = replace(asked.workload, spec=tiny, seq_len=64)
    found = search(replace(asked, knowledge=known, workload=workload))
    assert found.gap is not None and 0 <= found.gap < 0.01


def test_ranks_of_two_nodes_share_none() -> None:
    """Seven chips of each node are no group of seven on nodes of eight: half of them would then sum
    with a neighbour over no network."""
    found = search(on(pool("A100-SXM4-40GB", 2, 8, 1), samples=32))
    assert found.gap is not None and found.gap < 0.15


@pytest.mark.parametrize(("nodes", "ways"), [(2, 1), (3, 2), (4, 2)])
def test_a_node_between_two_others_sends_by_one_port_to_both(nodes: int, ways: int) -> None:
    """By hand, at 0.1 Gbit/s, beside which nothing takes long: activations of all samples one way,
    and gradients the other."""
    chips = pool("H100-SXM5-80GB", nodes, 2, 0.1)
    asked = on(chips)
    axes = dict(mesh_axes(1, (("tp", 2),)))
    shape = Shape(axes=axes, meshes=nodes, micro=1, recompute="off")
    options = Options(schedules=("1f1b",), zero=(0,), shapes={chips.chip.name: (shape,)})
    found = search(replace(asked, options=options))
    assert len(found.best.plan.pipelines[0].positions()) == nodes
    by_hand_s = (
        ways * 64 * 2048 * 2048 * 2 / (2 * asked.knowledge.hardware_of(chips).fabric.across_bytes_s)
    )
    least_s = 64 * Crossings(KnownCosts().of(asked, 1)).inside_s(
        Section(0, tuple(axes.items()), nodes)
    )
    assert least_s == pytest.approx(by_hand_s)
    assert 0.9 * found.best.time.step_s < least_s <= found.best.time.step_s


EXPERTS = replace(SIZES["olmoe-1b-7b"], num_layers=1)
FROZEN_ENDS = Training(units=(0.0, 1.0, 1.0, 0.0))


@pytest.mark.parametrize(
    ("workload", "chips", "levels"),
    [
        (
            Workload(spec=EXPERTS, seq_len=4096, samples=4),
            pool("H100-SXM5-80GB", 2, 2),
            (0, 1),
        ),
        (
            Workload(
                spec=replace(SIZES["llama2-7b"], num_layers=2),
                seq_len=8192,
                samples=64,
                training=FROZEN_ENDS,
            ),
            pool("H100-SXM5-80GB", 1, 2, 10),
            (3,),
        ),
    ],
    ids=["tokens go to experts in pieces", "ends compute while layers wait"],
)
def test_what_is_hidden_is_in_no_bound(
    workload: Workload, chips: ChipPool, levels: tuple[ZeroLevel, ...]
) -> None:
    options = Options(zero=levels, recompute=("off",), schedules=("1f1b",))
    found = search(Problem(workload, ClusterView((chips,)), options=options))
    assert 0.9 * found.best.time.step_s < found.bound_s <= found.best.time.step_s

"""What no plan can beat: never more than what is found, and near it where that is all there is."""

import pytest

from benchmarks.poorer import AS_COMMANDS
from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.models.llama.sizes import SIZES
from weft.planner.problem import Problem, Workload
from weft.planner.search import search
from weft.planner.search.least import Relaxed

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

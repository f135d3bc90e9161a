"""A richer cluster is planned no worse than a poorer one, for it may be used as if it were that."""

from dataclasses import replace

import pytest
from planner.told import Told

from benchmarks.poorer import AS_COMMANDS, compared, drawn
from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.models.llama.sizes import SIZES
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import search
from weft.planner.search.search import SearchRun

SAME = 1 + 1e-6
QUICK = Options(schedules=("1f1b",))
KINDS = catalogue()


def nodes(chip: str, num_nodes: int, chips: int) -> ChipPool:
    """At 1 Gbit/s."""
    return ChipPool(chip=KINDS[chip], num_nodes=num_nodes, chips_per_node=chips, network_gbit_s=1)


SLOW = {
    "llama3.2-1b": (
        2048,
        nodes("H100-SXM5-80GB", 2, 4),
        nodes("T4", 4, 8),
        nodes("RTX4090", 1, 8),
    ),
    "llama3-8b": (4096, nodes("A100-SXM4-40GB", 2, 4), nodes("RTX4090", 4, 2)),
}


@pytest.mark.parametrize("size", SLOW)
def test_one_kind_of_several_at_slow_links_is_planned_as_well_as_alone(size: str) -> None:
    seq_len, *pools = SLOW[size]
    workload = Workload(spec=SIZES[size], seq_len=seq_len, samples=128, precision="fp16")
    whole, part = (
        Problem(workload, ClusterView(tuple(some)), options=QUICK) for some in (pools, pools[:1])
    )
    most_s = search(part).best.time.step_s * SAME
    assert search(whole, watch=Told(most_s)).best.time.step_s <= most_s


def test_many_that_do_not_fit_are_no_reason_to_look_no_further() -> None:
    """Of pipelines through both kinds, those that look best want more memory than there is; half of
    the T4 alone were planned in two thirds of the time."""
    pools = nodes("T4", 1, 8), nodes("V100-SXM2-32GB", 1, 8)
    fast = [replace(pool, network_gbit_s=gbit) for pool, gbit in zip(pools, (100, 10), strict=True)]
    workload = Workload(spec=SIZES["llama2-13b"], seq_len=2048, samples=256, precision="fp16")
    problem = Problem(workload, ClusterView(tuple(fast)), options=AS_COMMANDS)
    found = search(problem, watch=Told(65.9))
    assert found.best.time.step_s < 66


def test_plans_that_are_called_the_same_are_refined_each() -> None:
    """With less memory another size of microbatch is first, which a list made for it makes faster
    than what is first with all, by 0.6 %: with seed 18, which takes long to search."""
    run = SearchRun(drawn(3, AS_COMMANDS, most_nodes=2, most_kinds=2), None)
    run.look_everywhere()
    near, apart = run.near(), run.distinct()
    alike = [lines for lines in near if lines not in apart]
    assert alike and max(lines.seconds for lines in near) < 1.35 * apart[0].seconds
    assert apart[0] in near


@pytest.mark.parametrize(("seed", "most_s"), [(72, 8.19), (18, 10.54)])
def test_what_is_refined_is_what_could_be_fastest_and_not_what_is_now(
    seed: int, most_s: float
) -> None:
    """Of the many that are not much slower, the fastest few with the usual order end 0.4 % slower
    than one that comes after them; and what is fastest when all that it keeps was given up, and as
    much as there is room for kept again, is slower by far in between."""
    less = replace(AS_COMMANDS, effort=AS_COMMANDS.effort // 10)
    assert search(drawn(seed, less, most_nodes=2)).best.time.step_s < most_s


def test_others_on_the_meshes_of_the_best_are_refined_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another schedule, which promised less: 3.6 % faster, and with two chips more, of which
    pipelines promise more, not among the 48 that are refined anyway."""
    monkeypatch.setattr("weft.planner.search.refined.MOST_PROMISING", 4)
    less = replace(AS_COMMANDS, effort=AS_COMMANDS.effort // 10)
    drawn_so = drawn(79, less, most_nodes=2)
    four = ClusterView(tuple(p for p in drawn_so.cluster.pools if p.chip.name.startswith("A100")))
    assert search(drawn_so.on(four)).best.time.step_s < 5.05


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 7])
def test_random_clusters_are_planned_no_worse_than_poorer_ones(seed: int) -> None:
    """Quick ones of those of ``benchmarks.poorer``."""
    whole = drawn(seed, QUICK, most_nodes=2, most_kinds=2)
    assert [each.what for each in compared(whole, seed) if each.worse] == []

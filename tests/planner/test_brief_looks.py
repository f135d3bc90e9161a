"""Frames are looked at briefly before they are looked at as a whole, where there is time."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.poorer import AS_COMMANDS
from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.models.llama.sizes import SIZES
from weft.planner.problem import Problem, Workload
from weft.planner.search.choice import Line, Timed
from weft.planner.search.costs import Costs
from weft.planner.search.found import Pruned
from weft.planner.search.group import BRIEF_FIRST, WHOLE, Group, Ledger, Look, Seen
from weft.planner.search.meshes import Meshes

KINDS = catalogue()


def pool(chip: str, per_node: int) -> ChipPool:
    return ChipPool(chip=KINDS[chip], num_nodes=2, chips_per_node=per_node, network_gbit_s=25)


def best(looks: tuple[Look, ...], effort: int) -> tuple[float, Ledger]:
    """Of pipelines through 16 RTX 4090 and 4 L40S: its seconds, and what became of the others."""
    options = replace(AS_COMMANDS, schedules=("1f1b",))
    workload = Workload(spec=SIZES["llama3-8b"], seq_len=4096, samples=200)
    cluster = ClusterView((pool("RTX4090", 8), pool("L40S", 2)))
    costs = Costs(Problem(workload, cluster, options=options), 1)
    group = Group(Meshes(costs), (0, 1), ledger := Ledger(Pruned()))
    found = group.best(200, 25.3, effort=effort, uncut=0, nearly=1.2, looks=looks)
    assert found is not None and found in group.found
    assert found.seconds == min(timed.seconds for timed in group.found)
    return found.seconds, ledger


def test_what_looks_best_by_its_bound_does_not_take_all_effort() -> None:
    """With less memory for each RTX 4090 its layers were divided by ``tp``, which the plan for the
    whole memory was 9.8 % slower without: the frames that need more memory ended the effort."""
    whole, _ = best(WHOLE, 500_000)
    brief, _ = best(BRIEF_FIRST, 500_000)
    assert brief < 0.95 * whole


@pytest.mark.parametrize("effort", [100_000, 1_000_000])
def test_what_is_looked_at_twice_counts_once_and_its_effort_twice(effort: int) -> None:
    _, whole = best(WHOLE, effort)
    _, brief = best(BRIEF_FIRST, effort)
    for ledger in (whole, brief):
        assert ledger.considered == ledger.simulated + ledger.pruned.total
    assert brief.effort > whole.effort


def test_a_look_takes_nothing_back() -> None:
    """A whole one that ends early finds less than the brief one before it."""
    line = Line((), 1, "1f1b", (), 1)
    seen = Seen(SimpleNamespace(stretch=2.0))  # type: ignore[arg-type]
    first, others = (Timed(seconds, line) for seconds in (3.0, 4.0))
    seen.add([first], Look(first=True, brief=True))
    seen.add([others], Look(first=True))
    assert seen.found == {True: [first, others]} and seen.seconds == 6.0
    better = Timed(2.0, line)
    seen.add([better], Look(first=True))
    assert seen.found == {True: [better]} and seen.seconds == 4.0
    seen.add([], Look(first=False))
    assert seen.seconds == 4.0

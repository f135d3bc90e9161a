"""Ranks of a plan on processes that are already somewhere."""

from __future__ import annotations

import random

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.renumber import renumbered

FAST, SLOW = catalogue()["H100-SXM5-80GB"], catalogue()["A100-SXM4-80GB"]


def pool(name: str, nodes: int, per_node: int, **more: float) -> ChipPool:
    chip = {"fast": FAST, "slow": SLOW}[name]
    return ChipPool(chip=chip, num_nodes=nodes, chips_per_node=per_node, **more)


def plan(*sizes: int) -> Plan:
    """A pipeline of stages with so many ranks, in the order of ranks."""
    stages, first = [], 0
    for number, size in enumerate(sizes):
        mesh = Mesh.of(range(first, first + size), dp=size)
        stages.append(StagePlan(mesh=mesh, layers=(number, number + 1)))
        first += size
    return Plan(
        num_layers=len(sizes),
        pipelines=(PipelinePlan(stages=tuple(stages), samples=8, microbatch=8),),
    )


def ranks(found: Plan) -> list[tuple[int, ...]]:
    return [stage.mesh.ranks for _, _, stage in found.stages()]


def test_kinds_in_another_order() -> None:
    """The plan goes through the slow chips first; the processes on them are numbered last."""
    used = ClusterView((pool("slow", 1, 2), pool("fast", 1, 3)))
    there = ClusterView((pool("fast", 1, 3), pool("slow", 1, 2)))
    assert ranks(renumbered(plan(2, 3), used, there)) == [(3, 4), (0, 1, 2)]
    assert renumbered(plan(2, 3), used, used) == plan(2, 3)


def test_chips_of_one_name_and_another_speed_are_another_kind() -> None:
    used = ClusterView((pool("fast", 1, 1, speed=0.5), pool("fast", 1, 1)))
    there = ClusterView((pool("fast", 1, 1), pool("fast", 1, 1, speed=0.5)))
    assert ranks(renumbered(plan(1, 1), used, there)) == [(1,), (0,)]


def test_who_shares_a_node_shares_one_again() -> None:
    """Two of a node of four, then four: these do not get what is left of the first node."""
    used = ClusterView((pool("fast", 1, 2), pool("fast", 1, 4), pool("fast", 1, 2)))
    there = ClusterView((pool("fast", 2, 4),))
    assert ranks(renumbered(plan(2, 4, 2), used, there)) == [(0, 1), (4, 5, 6, 7), (2, 3)]


def test_what_fits_no_node_is_spread() -> None:
    used = ClusterView((pool("fast", 1, 3), pool("fast", 1, 3)))
    there = ClusterView((pool("fast", 3, 2),))
    assert ranks(renumbered(plan(3, 3), used, there)) == [(0, 1, 2), (3, 4, 5)]


def test_too_few_chips_of_a_kind() -> None:
    used = ClusterView((pool("slow", 1, 2),))
    with pytest.raises(AssertionError, match=r"2 chips of .* wanted, 1 are there"):
        renumbered(plan(2), used, ClusterView((pool("fast", 1, 2), pool("slow", 1, 1))))


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_once_and_on_its_kind(seed: int) -> None:
    draw = random.Random(seed)
    pools = [
        pool(draw.choice(["fast", "slow"]), draw.randint(1, 3), draw.randint(1, 4))
        for _ in range(4)
    ]
    there = ClusterView(tuple(draw.sample(pools, len(pools))))
    used = ClusterView(tuple(pools))
    sizes = [p.num_chips for p in pools]
    found = renumbered(plan(*sizes), used, there)
    assert sorted(r for mesh in ranks(found) for r in mesh) == list(range(sum(sizes)))
    for each, mesh in zip(pools, ranks(found), strict=True):
        assert {there.pool_of(rank).chip.name for rank in mesh} == {each.chip.name}

"""Which kinds of chip are used, and which go together in a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from weft.cluster.view import ChipPool, ClusterView
from weft.memory.tiers import USUAL
from weft.planner.problem import Options
from weft.planner.search.choice import FEW_TO_CUT

Arrangement = tuple[tuple[int, ...], ...]
"""Groups of pools; each is a pipeline."""


def arrangements(num_pools: int, options: Options) -> Iterator[Arrangement]:
    """Which pools are used, and which go together; each alone first, then side by side."""
    every = []
    for number in range(1, num_pools + 1):
        for pools in combinations(range(num_pools), number):
            if options.leave_idle or number == num_pools:
                every += list(partitions(pools))
    yield from sorted(every, key=lambda groups: max(map(len, groups)))


def partitions(pools: Sequence[int]) -> Iterator[Arrangement]:
    """Every way to make groups of these pools."""
    if not pools:
        yield ()
        return
    first, rest = pools[0], pools[1:]
    for number in range(len(rest) + 1):
        for others in combinations(rest, number):
            left = [pool for pool in rest if pool not in others]
            for groups in partitions(left):
                yield ((first, *others), *groups)


def cut_in_two(cluster: ClusterView) -> Iterator[tuple[ClusterView, int]]:
    """The cluster, or its largest parts of few chips, with a pool in two, each way, and the number
    of the first half: for pipelines side by side on one kind of chip, or a kind at both ends of
    one.

    None of one kind of chip, or where all parts are large.
    """
    for part in _small_parts(cluster):
        for number, pool in enumerate(part):
            for halves in _halves(pool, f"cut {number}"):
                yield ClusterView((*part[:number], *halves, *part[number + 1 :])), number


def _small_parts(cluster: ClusterView) -> list[tuple[ChipPool, ...]]:
    """Several pools of few chips together, and none that others have in them."""
    found: list[tuple[int, ...]] = []
    pools = cluster.pools
    for number in range(len(pools), 1, -1):
        for some in combinations(range(len(pools)), number):
            few = sum(pools[pool].num_chips for pool in some) <= FEW_TO_CUT
            if few and not any({*some} <= {*other} for other in found):
                found.append(some)
    return [tuple(pools[pool] for pool in some) for some in found]


def _halves(pool: ChipPool, name: str) -> Iterator[tuple[ChipPool, ChipPool]]:
    """Whole nodes; or chips, where there is one."""
    if pool.num_nodes > 1:
        for nodes in range(1, pool.num_nodes // 2 + 1):
            rest = pool.num_nodes - nodes
            yield replace(pool, num_nodes=nodes), replace(pool, num_nodes=rest)
        return
    for chips in range(1, pool.chips_per_node // 2 + 1):
        part = replace(pool, node=pool.node or name)
        yield _chips_of(part, chips), _chips_of(part, pool.chips_per_node - chips)


def _chips_of(pool: ChipPool, chips: int) -> ChipPool:
    """Some of a node's, with their part of its memory and of its disk."""
    part, disk_gb_s = chips / pool.chips_per_node, pool.disk_gb_s or USUAL.disk / 1e9
    host_gib = None if pool.host_gib is None else part * pool.host_gib
    return replace(pool, chips_per_node=chips, host_gib=host_gib, disk_gb_s=part * disk_gb_s)

"""Small clusters with one pool in two parts: pipelines side by side on one kind of chip, or a kind
at both ends of a pipeline, where memory is short."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.cluster.view import ChipPool, ClusterView

FEW_CHIPS = 4
"""Of several kinds, up to which pools are cut."""


def cut_in_two(cluster: ClusterView) -> Iterator[tuple[ClusterView, int]]:
    """The cluster with one of its pools in two, each way, and the number of the first part.

    None of a large cluster, or of one kind of chip.
    """
    if len(cluster.pools) == 1 or cluster.world_size > FEW_CHIPS:
        return
    for number, pool in enumerate(cluster.pools):
        for parts in _halves(pool, f"cut {number}"):
            before, after = cluster.pools[:number], cluster.pools[number + 1 :]
            yield ClusterView((*before, *parts, *after)), number


def _halves(pool: ChipPool, name: str) -> Iterator[tuple[ChipPool, ChipPool]]:
    """Whole nodes; or chips, where there is one."""
    if pool.num_nodes > 1:
        for nodes in range(1, pool.num_nodes // 2 + 1):
            rest = pool.num_nodes - nodes
            yield replace(pool, num_nodes=nodes), replace(pool, num_nodes=rest)
        return
    for chips in range(1, pool.chips_per_node // 2 + 1):
        part = replace(pool, node=pool.node or name)
        rest = pool.chips_per_node - chips
        yield replace(part, chips_per_node=chips), replace(part, chips_per_node=rest)

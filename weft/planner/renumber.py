"""Put a plan's ranks where processes already are: a launcher numbered them, not the search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from weft.cluster.view import ClusterView, Site
from weft.plan.plan import Plan


def renumbered(plan: Plan, used: ClusterView, there: ClusterView) -> Plan:
    """The same plan on the ranks of ``there``, each on a chip of the kind it was planned for.

    Ranks that share a node in ``used`` share one again wherever one has room for them.

    Args:
        used: What the plan's ranks are numbered over: chips of ``there``, in any order.
    """
    nodes = list(_nodes(there))
    new = [rank for planned in _nodes(used) for rank in _take(nodes, planned)]
    return plan.on_ranks(new)


def ordered(plan: Plan, used: ClusterView, order: Sequence[int]) -> tuple[Plan, ClusterView]:
    """The same plan with its ranks counted through the pools of ``used`` in another order."""
    first = [0, *accumulate(pool.num_chips for pool in used.pools)]
    old = [rank for pool in order for rank in range(first[pool], first[pool + 1])]
    new = sorted(range(len(old)), key=old.__getitem__)
    return plan.on_ranks(new), ClusterView(tuple(used.pools[pool] for pool in order))


@dataclass(slots=True)
class _Node:
    """Ranks of one node that are not taken yet, and the kind of their chips and their site."""

    kind: tuple[str, float, Site | None]
    free: list[int]


def _nodes(cluster: ClusterView) -> Iterator[_Node]:
    first = 0
    for pool in cluster.pools:
        for _ in range(pool.num_nodes):
            ranks = range(first, first + pool.chips_per_node)
            yield _Node((pool.chip.name, pool.speed, pool.site), list(ranks))
            first = ranks.stop


def _take(nodes: list[_Node], planned: _Node) -> list[int]:
    """Ranks for one planned node: of the fullest node that has them all, else of several."""
    wanted = len(planned.free)
    alike = [node for node in nodes if node.kind == planned.kind and node.free]
    roomy = sorted((n for n in alike if len(n.free) >= wanted), key=lambda node: len(node.free))
    taken: list[int] = []
    for node in roomy[:1] or alike:
        part = node.free[: wanted - len(taken)]
        node.free = node.free[len(part) :]
        taken += part
    assert len(taken) == wanted, f"{wanted} chips of {planned.kind} wanted, {len(taken)} are there"
    return taken

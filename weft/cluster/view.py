"""A cluster as costs see it: pools of like nodes, and how far two ranks are apart.

Ten thousand chips of three kinds are three pools, so questions about a rank are arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from math import inf
from typing import Literal

from weft.cluster.cluster import Chip
from weft.config.errors import ConfigError

Reach = Literal["node", "across", "sites"]
"""How far a message goes: inside a node, to another node of the site, or to another site."""


@dataclass(frozen=True, slots=True)
class Site:
    """Nodes near each other (a rack, a pod, a building), and their one way to those of others."""

    name: str
    num_chips: int
    """That share the way out, used or not."""
    gbit_s: float
    """Of the way out, each way."""
    latency_s: float
    """Of a message to another site."""
    within: Site | None = None
    """The site that it is a part of, whose way out begins where its own ends."""

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def around(self) -> tuple[Site, ...]:
        """It, and every site that it is in, the smallest first."""
        return (self, *(self.within.around if self.within else ()))

    def at_level(self, level: int) -> Site:
        """Of those around it the outermost (1), the next, and so on, or itself."""
        return self.around[-min(level, len(self.around))]

    def faster(self, times: float) -> Site:
        """With so many times the rates; infinity is for links that take no time."""
        late_s, within = 0.0 if times == inf else self.latency_s, self.within
        return replace(
            self,
            gbit_s=self.gbit_s * times,
            latency_s=late_s,
            within=within and within.faster(times),
        )


Hop = frozenset[Site]
"""The ways out of two sites, or of one where there is none at the other end, of a message."""


@lru_cache(maxsize=1 << 12)
def hops_between(one: Site | None, other: Site | None) -> tuple[Hop, ...]:
    """Of a message between two sites: first those of what is in nothing, or in one site, together,
    then those nearer to each end. None inside a site."""
    mine, theirs = ([*site.around] if site else [] for site in (one, other))
    while mine and theirs and mine[-1] == theirs[-1]:
        del mine[-1], theirs[-1]
    both = zip_longest(reversed(mine), reversed(theirs))
    return tuple(frozenset(filter(None, ends)) for ends in both)


def count_by_level(sites: Iterable[Site | None]) -> tuple[int, ...]:
    """At how many sites these are, in how many these are, and so on, to what is in nothing; empty:
    in one place."""
    known = {*filter(None, sites)}
    outwards = range(depth_of(known), 0, -1)
    return tuple(len({site.at_level(level) for site in known}) for level in outwards)


def depth_of(sites: Iterable[Site]) -> int:
    """How many of them are inside each other at most."""
    return max((len(site.around) for site in sites), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChipPool:
    """Nodes with the same chips. Ranks count through a node, then through the nodes."""

    chip: Chip
    num_nodes: int
    chips_per_node: int
    network_gbit_s: float | None = None
    """One chip's part of its node's network; None takes the chip's usual adapter."""
    has_network: bool = True
    """False: it is the only node, nothing is known of links to another, and their rate means
    nothing."""
    oversubscription: float = 1.0
    """How many times the nodes' adapters exceed what the switches above them carry."""
    link_latency_s: float = 3e-6
    """Of a message inside a node."""
    network_latency_s: float = 10e-6
    node: str = ""
    """Pools that name the same node are in one machine; each then has one node."""
    speed: float = 1.0
    """Part of a processor's core that each chip is, in a lab."""
    price_per_hour: float | None = None
    """Of one chip, in any currency."""
    mtbf_hours: float | None = None
    """Mean time between failures of one chip with its part of the node; None is not known."""
    host_gib: float | None = None
    """Main memory of each node that chips may use; None: not known, and nothing is kept there."""
    host_gb_s: float | None = None
    """One way between a chip and that memory, 10^9 bytes/s; None takes the chip's own."""
    disk_gb_s: float | None = None
    """Of each node's disk, which its chips share, 10^9 bytes/s; None is not known."""
    hosts: tuple[str, ...] = ()
    """Names of the nodes, in their order; empty where nobody said them."""
    site: Site | None = None
    """Where its nodes are; None where all are in one place."""

    def __post_init__(self) -> None:
        counts = {"num_nodes": self.num_nodes, "chips_per_node": self.chips_per_node}
        for field, value in counts.items():
            if value < 1:
                raise ConfigError(f"pool of {self.chip.name}: {field}", value, "at least 1")
        if self.node and self.num_nodes > 1:
            key = f"pool of {self.chip.name}: num_nodes"
            raise ConfigError(key, self.num_nodes, f"1, as the pool is in node {self.node}")

    @property
    def num_chips(self) -> int:
        return self.num_nodes * self.chips_per_node

    @property
    def network_bytes_s(self) -> float:
        """Of one chip, as printed, with all nodes talking.

        Raises:
            ConfigError: neither the pool nor the catalogue says.
        """
        gbit_s = self.network_gbit_s or self.chip.network_gbit_s
        if gbit_s is None:
            key = f"pool of {self.chip.name}: network_gbit_s"
            raise ConfigError(key, None, "a positive number", "The catalogue does not know it.")
        return gbit_s / 8 * 1e9 / self.oversubscription

    @property
    def link_bytes_s(self) -> float:
        """Of one chip to the others of its node, as printed; alone on its node, it needs none."""
        if self.chip.link_gb_s is not None:
            return self.chip.link_gb_s * 1e9
        if self.chips_per_node == 1 and not self.node:
            return self.network_bytes_s
        key = f"chip {self.chip.name}: link_gb_s"
        raise ConfigError(key, None, "a positive number", "The catalogue does not know it.")


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Pools in the order in which their ranks are numbered."""

    pools: tuple[ChipPool, ...]

    @property
    def world_size(self) -> int:
        return sum(pool.num_chips for pool in self.pools)

    def first(self, num_chips: int) -> ClusterView:
        """Of all chips the first: whole nodes, and at the end perhaps a part of one."""
        pools, left = list[ChipPool](), num_chips
        for pool in self.pools:
            whole, rest = divmod(min(left, pool.num_chips), pool.chips_per_node)
            pools += [replace(pool, num_nodes=whole)] if whole else []
            pools += [replace(pool, num_nodes=1, chips_per_node=rest)] if rest else []
            left -= whole * pool.chips_per_node + rest
        return ClusterView(tuple(pools))

    def pool_of(self, rank: int) -> ChipPool:
        """The pool that a rank's chip is in."""
        before = 0
        for pool in self.pools:
            if rank < before + pool.num_chips:
                return pool
            before += pool.num_chips
        raise ConfigError("rank", rank, f"a rank below {self.world_size}")

    def by_pool(self, ranks: Sequence[int]) -> list[tuple[ChipPool, Sequence[int]]]:
        """The pools that these ranks' chips are in, each with its ranks."""
        first, last = (self.pool_of(rank) for rank in (min(ranks), max(ranks)))
        if first is last:
            return [(first, ranks)]
        found: dict[int, tuple[ChipPool, list[int]]] = {}
        for rank in ranks:
            pool = self.pool_of(rank)
            found.setdefault(id(pool), (pool, []))[1].append(rank)
        return list(found.values())

    def node_of(self, rank: int) -> int:
        """The number of a rank's node, counted through all pools."""
        before = nodes = 0
        named: dict[str, int] = {}
        """The number of each node that has a name."""
        for pool in self.pools:
            first = named.get(pool.node, nodes)
            if rank < before + pool.num_chips:
                return first + (rank - before) // pool.chips_per_node
            if pool.node:
                named[pool.node] = first
            before += pool.num_chips
            nodes += pool.num_nodes if first == nodes else 0
        raise ConfigError("rank", rank, f"a rank below {self.world_size}")

    def chips_with(self, pool: ChipPool) -> int:
        """Chips of each node of a pool, of all pools that name it."""
        if not pool.node:
            return pool.chips_per_node
        return sum(other.num_chips for other in self.pools if other.node == pool.node)

    @property
    def sites(self) -> tuple[Site, ...]:
        """Where its nodes are, in the order of pools; empty where all are in one place. What these
        are in is not among them."""
        return tuple(dict.fromkeys(pool.site for pool in self.pools if pool.site is not None))

    @property
    def farthest_sites(self) -> dict[Site, ClusterView]:
        """The largest sites of which there are several, or the one, and their chips: each pool in
        one of them."""
        found: dict[Site, list[ChipPool]] = {}
        for level in range(1, depth_of(self.sites) + 1):
            found = {}
            for pool in self.pools:
                if pool.site is not None:
                    found.setdefault(pool.site.at_level(level), []).append(pool)
            if len(found) > 1:
                break
        return {site: ClusterView(tuple(pools)) for site, pools in found.items()}

    def site_of(self, rank: int) -> Site | None:
        """Where a rank is."""
        return self.pool_of(rank).site

    def sites_of(self, ranks: Sequence[int]) -> tuple[Site | None, ...]:
        """Where any of the ranks are, each once."""
        return tuple(dict.fromkeys(pool.site for pool, _ in self.by_pool(ranks)))

    def reach(self, ranks: Sequence[int]) -> Reach:
        """As far as any two of the ranks are apart."""
        if self.share_a_node(ranks):
            return "node"
        if not self.sites or len(self.sites_of(ranks)) == 1:
            return "across"
        return "sites"

    def share_a_node(self, ranks: Sequence[int]) -> bool:
        """No message among the ranks needs a network."""
        node = self.node_of(ranks[0])
        return all(self.node_of(rank) == node for rank in ranks)


def alike_as_one(cluster: ClusterView) -> ClusterView:
    """The same chips with neighbouring pools as one where they differ in nothing but how many nodes
    they have, or how many chips of one node: to a search they are one kind, and nobody's rank
    changes."""
    found: list[ChipPool] = []
    for pool in cluster.pools:
        if found and (one := _as_one(found[-1], pool)):
            found[-1] = one
        else:
            found.append(pool)
    return ClusterView(tuple(found))


def _as_one(first: ChipPool, second: ChipPool) -> ChipPool | None:
    """None where they are unlike. Of what a node has for all its chips each may have said a
    part."""
    if bool(first.hosts) != bool(second.hosts):
        return None
    if first.node:
        said = first.host_gib, first.disk_gb_s, second.host_gib, second.disk_gb_s
        if said != (None,) * 4 or replace(first, chips_per_node=second.chips_per_node) != second:
            return None
        return replace(first, chips_per_node=first.chips_per_node + second.chips_per_node)
    if replace(first, num_nodes=second.num_nodes, hosts=second.hosts) != second:
        return None
    nodes, hosts = first.num_nodes + second.num_nodes, first.hosts + second.hosts
    return replace(first, num_nodes=nodes, hosts=hosts)

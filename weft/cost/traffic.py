"""Links between ranks, and how long collectives take over them.

A ring sends ``2 (n - 1) / n`` of a tensor for an all-reduce and half of that for a reduce-scatter
or an all-gather, in ``n - 1`` steps one after another; a tree, which only an all-reduce has, takes
fewer steps where messages are small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf, log2
from typing import Literal, NamedTuple

from weft.cluster.view import Hop, Site, hops_between
from weft.cost.choice import Group

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "send"]


LINK_REACHED = 0.7
"""Part of a data sheet's rate that collectives inside nodes reach."""
NETWORK_REACHED = 0.8
"""Likewise between nodes."""
MOST_LOST_S = 1e-4
"""Between two steps of a ring: hosts and switches take no longer because a link is slow."""
MADE_REACHED = 0.95
"""Of a link that a lab makes: the rest is what packets carry besides."""


class WayOut(NamedTuple):
    """Of a site, to all others that are in the same."""

    bytes_s: float
    """One chip's part of it."""
    latency_s: float

    @staticmethod
    def of(site: Site) -> WayOut:
        """What messages reach there."""
        return WayOut(_reached(site) / site.num_chips, site.latency_s)


def _reached(site: Site) -> float:
    return site.gbit_s / 8 * 1e9 * NETWORK_REACHED


@dataclass(frozen=True, slots=True)
class Far:
    """What a message takes between two sites, and how many of such share each of its ways."""

    hops: tuple[tuple[Hop, int], ...]

    @staticmethod
    def between(one: Site | None, other: Site | None) -> Far:
        """Of one that is alone there."""
        return Far(tuple((hop, 1) for hop in hops_between(one, other)))

    def seconds(self, num_bytes: float) -> float:
        """On the way that takes longest: a long message is on all of them at once."""
        return max(num_bytes * many / min(map(_reached, hop)) for hop, many in self.hops)

    @property
    def latency_s(self) -> float:
        """Of all ways one after another."""
        return sum(max(site.latency_s for site in hop) for hop, _ in self.hops)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """The links that one rank sees. Rates are one way, and what messages really reach."""

    chips_per_node: int
    inside_bytes_s: float
    """One chip to the others of its node together."""
    across_bytes_s: float
    """One chip's part of its node's way out."""
    inside_latency_s: float = 3e-6
    across_latency_s: float = 10e-6
    ways_out: tuple[WayOut, ...] = ()
    """Of its site, where there are several, of what that is in, and so on."""
    trips: int = 1
    """Of messages, one after another, in each step of a ring or a tree beyond nodes: two by gloo,
    where a rank that receives first says that there is room."""
    exchange_bytes_s: float | None = None
    """Of ranks that swap parts of a tensor, where that was measured; None: they
    go round as all do."""
    exchange_latency_s: float = 0.0
    scatter_bytes_s: float | None = None
    """Of what a rank sends inside its node where sums are divided among ranks, and where these make
    parameters whole again, if that was measured."""
    gather_bytes_s: float | None = None
    piece_bytes: float = 256e3
    """Steps of a ring across nodes that carry less than this reach half the rate; those that carry
    more lose as much, but no more than ``MOST_LOST_S``."""

    def faster(self, inside: float, across: float) -> Fabric:
        """With so many times the rates; infinity is for links that take no time."""
        return replace(
            self,
            inside_bytes_s=self.inside_bytes_s * inside,
            across_bytes_s=self.across_bytes_s * across,
            scatter_bytes_s=self.scatter_bytes_s and self.scatter_bytes_s * inside,
            gather_bytes_s=self.gather_bytes_s and self.gather_bytes_s * inside,
            inside_latency_s=0.0 if inside == inf else self.inside_latency_s,
            across_latency_s=0.0 if across == inf else self.across_latency_s,
        )

    def members_on_node(self, group: Group) -> int:
        """Ranks of a group that share a node."""
        return max(1, min(group.size, self.chips_per_node // max(group.stride, 1)))

    def stays_inside(self, group: Group) -> bool:
        """No message of the group leaves its node."""
        return not group.leaves_its_site and (group.size - 1) * group.stride < self.chips_per_node

    def seconds(
        self, kind: Collective, num_bytes: float, group: Group, *, messages: float = 1.0
    ) -> float:
        """Of one collective on so many bytes in so many messages, one after another."""
        if group.size <= 1 or num_bytes <= 0:
            return 0.0
        inside = self.stays_inside(group)
        if kind == "send":
            rate = self.inside_bytes_s if inside else self.across_bytes_s
            return num_bytes / rate + messages * self._late_s(inside=inside)
        latency = messages * self._late_s(inside=inside) * (1 if inside else self.trips)
        sent = num_bytes / self._ring_rate(group, inside=inside)
        part = (group.size - 1) / group.size
        hops = group.size / self.members_on_node(group)
        piece = min(self.piece_bytes, num_bytes / messages / group.size)
        waiting = 0.0 if inside else messages * hops * _piece_s(piece, self.across_bytes_s)
        around = _hops(hops, group) * latency + waiting
        around += messages * (group.size - hops) * self.inside_latency_s
        ways = self._ways_of(group)
        for way, many in ways:
            late_s = _hops(many, group) * self.trips * way.latency_s
            around += messages * (late_s + many * _piece_s(piece, way.bytes_s))
        ring = part * sent + around
        if kind != "all_reduce":
            return ring
        up = ceil(log2(group.size)) * latency
        up += sum(ceil(log2(many)) * messages * self.trips * way.latency_s for way, many in ways)
        return 2 * min(ring, sent + up)

    def _late_s(self, *, inside: bool) -> float:
        """Of a message."""
        return self.inside_latency_s if inside else self.across_latency_s

    def shared_seconds(
        self,
        kind: Literal["reduce_scatter", "all_gather"],
        num_bytes: float,
        group: Group,
        *,
        messages: float = 1.0,
    ) -> float:
        """Of what ranks that divide parameters among them send one another."""
        rate = self.scatter_bytes_s if kind == "reduce_scatter" else self.gather_bytes_s
        if rate is None or group.size <= 1 or num_bytes <= 0 or not self.stays_inside(group):
            return self.seconds(kind, num_bytes, group, messages=messages)
        sent = (group.size - 1) / group.size * num_bytes
        return sent / rate + messages * (group.size - 1) * self.inside_latency_s

    def sum_seconds(self, num_bytes: float, group: Group) -> float:
        """Of summing partial results over tensor-parallel ranks: a swap of parts there and back."""
        if self.exchange_bytes_s is None or group.size == 1 or group.leaves_its_site:
            return self.seconds("all_reduce", num_bytes, group)
        sent = (group.size - 1) / group.size * num_bytes
        return 2 * (sent / self.exchange_bytes_s + self.exchange_latency_s)

    def _ring_rate(self, group: Group, *, inside: bool) -> float:
        """Rings of a group that leaves the node, or the site, use the ways out of all its members
        there."""
        if inside:
            return self.inside_bytes_s
        rate = min(self.inside_bytes_s, self.across_bytes_s * self.members_on_node(group))
        ways = self._ways_of(group)
        return min([rate, *(way.bytes_s * group.size / many for way, many in ways)])

    def _ways_of(self, group: Group) -> list[tuple[WayOut, int]]:
        """That it takes, each with how many of the kind there are."""
        inwards = reversed(self.ways_out), reversed(group.sites)
        both = zip(*inwards, strict=False)  # not all sites are as deep in others
        return [(way, many) for way, many in both if many > 1]

    def dispatch_seconds(
        self,
        num_bytes: float,
        copies: int,
        group: Group,
        *,
        most_nodes: int = 0,
        in_turn: bool = False,
        far_bytes: float | None = None,
        alone: bool = False,
    ) -> float:
        """Of sending each token to so many of the group's ranks, chosen evenly.

        ``most_nodes``: it crosses to so many nodes at most, to each once, and those who take it
        copy it there; 0: to every rank by itself.
        ``num_bytes``: of all tokens, one copy each. ``in_turn``: inside nodes first, then between.
        ``alone``: each rank sends every other one a message of its own, one after another.
        ``far_bytes``: of those that go to other nodes, where they have other bytes there.
        """
        if group.size <= 1 or num_bytes <= 0:
            return 0.0
        here = self.members_on_node(group)
        nodes = group.size / here
        visited: float = copies
        if most_nodes:
            visited = min(nodes * (1 - (1 - 1 / nodes) ** copies), most_nodes)
        inner = num_bytes * copies * (here - 1) / here / self.inside_bytes_s
        far = num_bytes if far_bytes is None else far_bytes
        outer = far * visited * (nodes - 1) / nodes / self.across_bytes_s
        for way, many in self._ways_of(group):
            outer = max(outer, far * visited * (many - 1) / many / way.bytes_s) + way.latency_s
        if in_turn and nodes > 1:
            turns = (
                self.inside_latency_s * ceil(log2(here)),
                self.across_latency_s * ceil(log2(nodes)),
            )
            return inner + outer + sum(turns)
        if alone:
            late = (here - 1) * self.inside_latency_s + (group.size - here) * self.across_latency_s
            return max(inner / nodes, outer) + late
        latency = self.inside_latency_s if nodes == 1 else self.across_latency_s
        return max(inner, outer) + latency * ceil(log2(group.size))


def _hops(places: float, group: Group) -> float:
    """Of the messages one after another around a ring, those that leave so many places: all but one
    where each rank is at one of its own."""
    return places - (places == group.size)


def _piece_s(piece: float, bytes_s: float) -> float:
    """What a step of a ring loses."""
    return min(piece / bytes_s, MOST_LOST_S)

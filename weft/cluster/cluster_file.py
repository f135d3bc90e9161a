"""A cluster as a person writes it down: pools of chips to plan for, or hosts that a lab plays."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from weft.cluster.cluster import Chip
from weft.cluster.pool_entries import OwnChip, PoolEntry, SiteEntry, view_of
from weft.cluster.view import ChipPool, ClusterView, alike_as_one
from weft.config.check import check_file
from weft.config.errors import ConfigError, ConfigErrors
from weft.config.tree import Origin, Reading
from weft.config.values import Number, Positive, Section, Text

HOST_NAME = re.compile(r"[a-z][a-z0-9]{0,11}")
LEAST_GBIT, MOST_GBIT = 0.00001, 10_000.0
"""What a link of a lab can be limited to."""


class ChipEntry(Section):
    """One chip of a host: one rank runs on it."""

    kind: Text
    """What reports call it; chips of one kind are equal."""
    speed: Annotated[Positive, Field(ge=0.01, le=1.0)] = 1.0
    """Part of one core's time that its rank gets."""
    memory_gib: Positive | None = None
    """Most memory that its rank may hold; null sets no limit."""


class HostEntry(Section):
    """One machine."""

    name: Text
    """Small letters and digits; faults name hosts by it."""
    node: Text | None = None
    """Hosts of one node are joined by links of the class `inside`; null is a node of its own."""
    chips: Annotated[tuple[ChipEntry, ...], Field(min_length=1)]
    """Ranks are numbered in the order of the file."""


class LinkEntry(Section):
    """How fast links of one class are, each way."""

    gbit: Positive | None = None
    """10^9 bits per second; null is as fast as the machine can."""
    latency_ms: Annotated[Number, Field(le=10_000)] = 0.0
    """How much later everything arrives."""


class LinksEntry(Section):
    """The classes of links."""

    inside: LinkEntry = LinkEntry()
    """Each host's link to the switch of its node."""
    between: LinkEntry = LinkEntry()
    """Each node's link to the switch that joins nodes; the hosts of a node share it."""


class ClusterFile(Section):
    """The cluster that the file describes: hosts and links of a lab, or pools of chips."""

    hosts: Annotated[tuple[HostEntry, ...], Field(min_length=1)] = ()
    """The machines of a lab, in the order in which ranks are numbered."""
    links: LinksEntry = LinksEntry()
    """How fast hosts are joined."""
    pools: Annotated[tuple[PoolEntry, ...], Field(min_length=1)] = ()
    """Nodes by kind of chip, in the order in which ranks are numbered; instead of hosts."""
    chips: tuple[OwnChip, ...] = ()
    """Chips in pools that the catalogue lacks."""
    sites: tuple[SiteEntry, ...] = ()
    """Where pools are, if that is far apart."""

    @model_validator(mode="after")
    def _one_kind_of_cluster(self) -> Self:
        if not self.hosts and not self.pools:
            raise ConfigError("pools", None, "pools of chips, or hosts that a lab plays")
        if self.hosts and self.pools:
            hint = "A lab has hosts; what is only planned for has pools."
            raise ConfigError("pools", f"{len(self.pools)} pools", "no pools beside hosts", hint)
        if self.pools and self.links != LinksEntry():
            hint = "A pool says network_gbit and link_gb_s itself."
            raise ConfigError("links", "links", "no links beside pools", hint)
        if self.hosts and self.chips:
            hint = "Hosts say speed and memory_gib of each chip."
            raise ConfigError("chips", f"{len(self.chips)} chips", "no chips beside hosts", hint)
        if self.hosts and self.sites:
            hint = "Hosts of one node are a site: links.between joins nodes."
            raise ConfigError("sites", f"{len(self.sites)} sites", "no sites beside hosts", hint)
        view_of(self.pools, self.chips, self.sites)
        return self

    @model_validator(mode="after")
    def _names(self) -> Self:
        names: list[str] = []
        for number, host in enumerate(self.hosts):
            key = f"hosts[{number}].name"
            if not HOST_NAME.fullmatch(host.name):
                expected = "a small letter, then at most 11 small letters and digits"
                raise ConfigError(key, host.name, expected, "Faults write links as NAME-NAME.")
            if host.name in names:
                other = f"hosts[{names.index(host.name)}]"
                raise ConfigError(key, host.name, "a name of its own", f"{other} has the same.")
            names.append(host.name)
        return self

    @model_validator(mode="after")
    def _rates(self) -> Self:
        for key, link in self.links:
            if link.gbit is not None and not LEAST_GBIT <= link.gbit <= MOST_GBIT:
                expected = f"a number from {LEAST_GBIT:.5f} to {MOST_GBIT:g}, or null"
                hint = "With null it is as fast as the machine can." * (link.gbit > MOST_GBIT)
                raise ConfigError(f"links.{key}.gbit", link.gbit, expected, hint)
        return self

    @property
    def world_size(self) -> int:
        """Ranks: one a chip."""
        return sum(len(host.chips) for host in self.hosts)

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the hosts that share a switch, node by node in the order of the file."""
        found: dict[str, list[int]] = {}
        for number, host in enumerate(self.hosts):
            found.setdefault(f"node {host.node}" if host.node else host.name, []).append(number)
        return tuple(tuple(numbers) for numbers in found.values())

    def ranks_of(self, host: int) -> range:
        """The ranks of one host."""
        first = sum(len(other.chips) for other in self.hosts[:host])
        return range(first, first + len(self.hosts[host].chips))

    @property
    def by_rank(self) -> tuple[tuple[int, ChipEntry], ...]:
        """By rank: the number of its host, and its chip."""
        return tuple((n, chip) for n, host in enumerate(self.hosts) for chip in host.chips)


def read_cluster(path: Path) -> ClusterFile:
    """Read the hosts of a lab from a YAML file.

    Raises:
        ConfigErrors: everything that is wrong with it, with keys and lines.
    """
    cluster = read_file(path)
    if cluster.pools:
        hint = "No machine can play data-sheet chips; `weft plan --cluster` plans for them."
        raise ConfigError("CLUSTER", str(path), "a file with hosts, not pools", hint)
    return cluster


def read_view(path: Path, *, core: Core | None = None) -> ClusterView:
    """Read a cluster to plan for from a YAML file: pools, or the hosts of a lab.

    Args:
        core: What a core of the lab's machine does; None takes that of an ordinary server.

    Raises:
        ConfigErrors: everything that is wrong with it, with keys and lines.
    """
    cluster = read_file(path)
    if cluster.pools:
        return view_of(cluster.pools, cluster.chips, cluster.sites)
    return lab_view(cluster, core or Core())


@dataclass(frozen=True, kw_only=True, slots=True)
class Core:
    """A processor's core, as far as nothing was measured."""

    tflops: float = 0.07
    """fp32, as printed."""
    memory_gb_s: float = 10.0
    memory_gib: float = 4.0
    """Of a chip that sets no limit."""
    loopback_gb_s: float = 2.0
    """Between processes of one machine."""


def lab_view(cluster: ClusterFile, core: Core) -> ClusterView:
    """Hosts that share a switch are one node; equal neighbouring nodes are one pool."""
    node_of = {host: n for n, hosts in enumerate(cluster.nodes) for host in hosts}
    equal = groupby((node_of[host], chip) for host, chip in cluster.by_rank)
    runs = [(node, chip, len(list(same))) for (node, chip), same in equal]
    pieces = Counter(node for node, _, _ in runs)
    pools: list[ChipPool] = []
    for node, chip, count in runs:
        pool = _lab_pool(cluster, core, node, chip)
        pool = replace(pool, chips_per_node=count, node=f"node {node}" if pieces[node] > 1 else "")
        pools.append(pool)
    return alike_as_one(ClusterView(tuple(pools)))


def _lab_pool(cluster: ClusterFile, core: Core, node: int, chip: ChipEntry) -> ChipPool:
    """One chip of a node: all chips of the node share its way out."""
    hosts = cluster.nodes[node]
    inside, between = cluster.links.inside, cluster.links.between
    crowd = sum(len(cluster.hosts[host].chips) for host in hosts)
    loopback_gbit = 8 * core.loopback_gb_s
    near = (inside.gbit or loopback_gbit) if len(hosts) > 1 else loopback_gbit
    part = Chip(
        name=chip.kind,
        vendor="CPU",
        memory_gib=chip.memory_gib or core.memory_gib,
        peak_tflops={"fp32": core.tflops * chip.speed},
        measured_tflops={},
        memory_gb_s=core.memory_gb_s * chip.speed,
        link="loopback",
        link_gb_s=near / 8,
        confidence="low",
    )
    return ChipPool(
        chip=part,
        num_nodes=1,
        chips_per_node=1,
        network_gbit_s=min(near, (between.gbit or loopback_gbit) / crowd),
        link_latency_s=_LOOPBACK_S + inside.latency_ms / 1e3 * (len(hosts) > 1),
        network_latency_s=_LOOPBACK_S + (inside.latency_ms + between.latency_ms) / 1e3,
        speed=chip.speed,
    )


_LOOPBACK_S = 50e-6
"""Of a message between two processes of one machine."""


KEYS = "a section with keys of hosts, links (a lab), or of pools, chips, sites (to plan for)"


def read_file(path: Path) -> ClusterFile:
    """Either kind of file.

    Raises:
        ConfigErrors: everything that is wrong with it, with keys and lines.
    """

    def wrong(expected: str, hint: str, where: str = "") -> ConfigError:
        return ConfigError("CLUSTER", str(path), expected, hint, where=where)

    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        hint = f"{error.strerror}."
        raise wrong("a YAML file that describes a cluster", hint) from error
    except UnicodeDecodeError as error:
        raise wrong("a YAML file", "It is not UTF-8 text.") from error
    reading = Reading(lambda line: Origin("file", f"{path}:{line}"))
    entry = reading.read(text)
    try:
        if reading.errors:
            raise ConfigErrors(reading.errors)
        if entry is None or entry.value is None:
            raise wrong(KEYS, "It is empty.")
        if not isinstance(entry.value, Mapping):
            hint = "It is a list." if isinstance(entry.value, list) else "It is one value."
            raise ConfigErrors([wrong(KEYS, hint, str(entry.origin))])
        return check_file(entry, ClusterFile)
    except ConfigErrors as errors:
        for each in errors.errors:  # of what is by default, at least the file is known
            each.where = f"in {path}" if each.where in ("", "by default") else each.where
        raise

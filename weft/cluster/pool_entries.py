"""Pools of chips as a person writes them down, and what they become: pools of a cluster's view.

Values are in the units of data sheets. A number that is off by a unit's factor (bytes for GiB,
TB/s for GB/s) is refused here, for every prediction after it would be nonsense.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from weft.cluster.cluster import Chip, catalogue, packages
from weft.cluster.host_names import host_names
from weft.cluster.view import ChipPool, ClusterView, Site, alike_as_one
from weft.config.errors import ConfigError
from weft.config.names import nearest_name
from weft.config.values import Count, Number, Positive, Section, Text

FLOPS_PER_BYTE = (0.5, 5000.0)
"""Matrix FLOP/s beside bytes/s of memory: 5 of a processor's core, 295 of an H100."""

Tflops = Annotated[Positive, Field(le=100_000)]
Gigabytes = Annotated[Positive, Field(le=100_000)]
MOST_CHIPS = 10_000_000
"""Of a cluster; more than anybody has, and a number with a digit too many is found."""


class PeakEntry(Section):
    """Dense matrix products, 10^12 FLOP/s."""

    bf16: Tflops | None = None
    """With bf16 operands."""
    fp16: Tflops | None = None
    """With fp16 operands."""
    fp32: Tflops | None = None
    """With fp32 operands."""
    tf32: Tflops | None = None
    """fp32 operands, rounded."""
    fp8: Tflops | None = None
    """With fp8 operands."""


class OwnChip(Section):
    """A chip that the catalogue lacks."""

    name: Text
    """What pools call it."""
    vendor: Text = "unknown"
    """Who makes it."""
    peak_tflops: PeakEntry
    """As the data sheet prints them."""
    memory_gib: Annotated[Positive, Field(le=10_000)]
    """Of one chip."""
    memory_gb_s: Gigabytes
    """Bandwidth of its memory, 10^9 bytes/s."""
    link_gb_s: Gigabytes | None = None
    """One chip to the others of its node, one way, 10^9 bytes/s; null for a chip alone."""
    power_w: Annotated[Positive, Field(ge=1, le=100_000)] | None = None
    """At full load."""

    def chip(self) -> Chip:
        """As the catalogue holds chips."""
        known = {chip.vendor.casefold(): chip.vendor for chip in catalogue().values()}
        vendor = known.get(self.vendor.casefold(), self.vendor)
        own = dict(self) | {"peak_tflops": dict(self.peak_tflops), "vendor": vendor}
        return Chip(**own, measured_tflops={}, confidence="low")


class PoolEntry(Section):
    """Nodes with the same chips."""

    chip: Text
    """Name of a chip or package in the catalogue (`weft chips`), or of a chip in `chips`."""
    nodes: Annotated[Count, Field(le=1_000_000)] = 1
    """How many nodes."""
    chips_per_node: Annotated[Count, Field(le=4096)]
    """Chips of each node: one rank a chip, or one for each device of a package."""
    host_gib: Annotated[Positive, Field(le=1_000_000)] | None = None
    """Main memory of each node that state, parameters and activations may take; null is none."""
    host_gb_s: Gigabytes | None = None
    """One chip to that memory, one way, 10^9 bytes/s; null is the chip's own link."""
    disk_gb_s: Gigabytes | None = None
    """Of each node's disk, each way, for what is kept there; null is 2."""
    network_gbit: Annotated[Positive, Field(ge=0.01, le=10_000)] | None = None
    """One chip's part of its node's network, 10^9 bits/s; null is the chip's usual adapter."""
    link_gb_s: Gigabytes | None = None
    """One chip to the others of its node, one way, 10^9 bytes/s; null is the chip's own link."""
    oversubscription: Annotated[Positive, Field(ge=1, le=1e6)] = 1.0
    """How many times the nodes' adapters exceed what the switches above them carry."""
    latency_us: Annotated[Number, Field(le=1_000_000)] = 10.0
    """Of a message between nodes, 10^-6 s."""
    node: Text | None = None
    """Pools that name the same node are in one machine."""
    price_per_hour: Annotated[Number, Field(le=1_000_000_000)] | None = None
    """Of one chip, in any currency."""
    mtbf_hours: Annotated[Positive, Field(le=1_000_000_000)] | None = None
    """Mean time between failures of one chip with its part of the node; null is 50,000 where it is
    asked for (`weft plan --goodput`)."""
    hosts: tuple[Text, ...] = ()
    """Names of the nodes, for the commands of `weft plan --launch`; `gpu[01-16]` names sixteen."""
    site: Text | None = None
    """Name of the site in `sites` where its nodes are; null where all pools are in one place."""


class SiteEntry(Section):
    """Nodes near each other, farther from those of other sites."""

    name: Text
    """What pools call it."""
    gbit: Annotated[Positive, Field(ge=0.001, le=100_000)]
    """Of its way out, each way, 10^9 bits/s; all its chips share it."""
    latency_ms: Annotated[Number, Field(le=10_000)] = 0.0
    """Of a message to another site, 10^-3 s."""
    inside: Text | None = None
    """Name of the site in `sites` that it is a part of, as a rack is of a pod, to any depth: its
    way out leads to others in there, and to that one's way out."""


def view_of(
    pools: Sequence[PoolEntry], own: Sequence[OwnChip], sites: Sequence[SiteEntry] = ()
) -> ClusterView:
    """The pools of a file.

    Raises:
        ConfigError: a chip, a rate or a site that is not known, or cannot be meant.
    """
    for number, chip in enumerate(own):
        _refuse_own(chip, f"chips[{number}]", own[:number])
    _refuse_sites(pools, sites)
    view = _at_sites([_pool(pools, number, own) for number in range(len(pools))], pools, sites)
    _refuse_shared_hosts(view)
    view = alike_as_one(view)
    if view.world_size > MOST_CHIPS:
        raise ConfigError("pools", f"{view.world_size:,} chips", f"at most {MOST_CHIPS:,} chips")
    return view


def _refuse_sites(pools: Sequence[PoolEntry], sites: Sequence[SiteEntry]) -> None:
    """Each pool is at one of two sites or more, and each site has pools or sites; or there are
    none."""
    names = [site.name for site in sites]
    if len(names) == 1 or len({*names}) < len(names):
        raise ConfigError("sites", names, "two names or more, each once, or no sites")
    for number, pool in enumerate(pools):
        _refuse_site(pool, pools, names, f"pools[{number}].site")
    _refuse_inside(sites)
    used = [*(pool.site for pool in pools), *(site.inside for site in sites)]
    for number, name in enumerate(names):
        if name not in used:
            expected = "a site that some pool is at (pools[].site), or that another is inside"
            raise ConfigError(f"sites[{number}].name", name, expected)


def _refuse_inside(sites: Sequence[SiteEntry]) -> None:
    """Those that others are inside are known, and none is inside itself."""
    within = {site.name: site.inside for site in sites}
    for number, site in enumerate(sites):
        others = [name for name in within if site.name not in _around(name, within)]
        if site.inside is not None and site.inside not in others:
            expected = f"one of {', '.join(others)}" if others else "null: all others are inside it"
            raise ConfigError(f"sites[{number}].inside", site.inside, expected)


def _around(name: str, within: Mapping[str, str | None]) -> list[str]:
    """A site and all that it is in, as far as these are known and no one comes twice."""
    found: list[str] = []
    outer: str | None = name
    while outer is not None and outer in within and outer not in found:
        found.append(outer)
        outer = within[outer]
    return found


def _refuse_site(
    pool: PoolEntry, pools: Sequence[PoolEntry], names: Sequence[str], key: str
) -> None:
    if pool.site not in names and (names or pool.site is not None):
        expected = f"one of {', '.join(names)}" if names else "null where the file has no sites"
        raise ConfigError(key, pool.site, expected)
    together = next(other for other in pools if other.node == pool.node)
    if pool.node and together.site != pool.site:
        raise ConfigError(key, pool.site, f"{together.site}, where node {pool.node} is")


def _at_sites(
    chips: Sequence[ChipPool], pools: Sequence[PoolEntry], sites: Sequence[SiteEntry]
) -> ClusterView:
    """Each pool where its entry says."""
    within = {site.name: site.inside for site in sites}
    many: Counter[str] = Counter()
    for pool, entry in zip(chips, pools, strict=True):
        for name in _around(entry.site, within) if entry.site else ():
            many[name] += pool.num_chips
    known: dict[str | None, Site] = {}
    for site in sorted(sites, key=lambda site: len(_around(site.name, within))):  # outer ones first
        late_s, outer = site.latency_ms / 1e3, known.get(site.inside)
        known[site.name] = Site(site.name, many[site.name], site.gbit, late_s, outer)
    both = zip(chips, pools, strict=True)
    return ClusterView(tuple(replace(pool, site=known.get(entry.site)) for pool, entry in both))


def _refuse_shared_hosts(view: ClusterView) -> None:
    """A host has the chips of one pool, or of all pools in one node, which is that host."""
    homes: dict[str, str] = {}
    named: dict[str, tuple[int, tuple[str, ...]]] = {}
    for number, pool in enumerate(view.pools):
        home = f"node {pool.node}" if pool.node else f"pools[{number}]"
        for host in pool.hosts:
            if homes.setdefault(host, home) != home:
                expected = f"hosts of its own; {homes[host]} has this one"
                raise ConfigError(f"pools[{number}].hosts", host, expected)
        if pool.node and pool.hosts:
            other, hosts = named.setdefault(pool.node, (number, pool.hosts))
            if hosts != pool.hosts:
                expected = f"{list(hosts)}, as pools[{other}] has it of the same node"
                raise ConfigError(f"pools[{number}].hosts", list(pool.hosts), expected)


def _refuse_own(own: OwnChip, key: str, before: Sequence[OwnChip]) -> None:
    """What one number alone cannot show."""
    if own.name in {*catalogue(), *packages(), *(other.name for other in before)}:
        raise ConfigError(f"{key}.name", own.name, "a name of its own", "This one is taken.")
    peaks = own.peak_tflops
    peak = peaks.bf16 or peaks.fp16 or peaks.fp32
    if peak is None:
        given = {name: value for name, value in peaks if value is not None}
        raise ConfigError(f"{key}.peak_tflops", given, "a number for bf16, fp16 or fp32")
    per_byte = peak * 1e3 / own.memory_gb_s
    low, high = FLOPS_PER_BYTE
    if not low <= per_byte <= high:
        hint = f"With {peak:g} TFLOP/s that is {per_byte:,.3g} FLOP for each byte of memory moved."
        expected = f"10^9 bytes/s, {peak * 1e3 / high:,.3g} to {peak * 1e3 / low:,.3g}"
        raise ConfigError(f"{key}.memory_gb_s", own.memory_gb_s, expected, hint)
    _refuse_fast_link(own.link_gb_s, own.memory_gb_s, f"{key}.link_gb_s")


def _refuse_fast_link(link_gb_s: float | None, memory_gb_s: float | None, key: str) -> None:
    """No link is faster than the memory that it reads."""
    if link_gb_s is not None and memory_gb_s is not None and link_gb_s > memory_gb_s:
        expected = f"at most memory_gb_s ({memory_gb_s:g})"
        raise ConfigError(key, link_gb_s, expected, "Are these 10^9 bits/s?")


def _chip_named(name: str, key: str, own: Iterable[OwnChip]) -> Chip:
    """A chip of the file or of the catalogue; of a package, each of its devices.

    Raises:
        ConfigError: neither has it; offers the nearest name.
    """
    chips = {chip.name: chip.chip() for chip in own}
    known: Mapping[str, Chip] = {**catalogue(), **packages(), **chips}
    if name in known:
        return known[name]
    lower = {other.lower(): other for other in known}
    beginning = sorted(other for other in lower if other.startswith(name.lower()))
    near = beginning or list(filter(None, [nearest_name(name.lower(), lower)]))
    offer = " or ".join(lower[other] for other in near)
    hint = f"Did you mean {offer}?" if offer else "`weft chips` lists them."
    raise ConfigError(key, name, "a chip of the catalogue, or one described under chips", hint)


def _pool(pools: Sequence[PoolEntry], number: int, own: Sequence[OwnChip]) -> ChipPool:
    key, asked = f"pools[{number}]", pools[number]
    chip = _chip_named(asked.chip, f"{key}.chip", own)
    parts = chip.devices if asked.chip == chip.package else 1
    memory_gb_s = chip.memory_gb_s and parts * chip.memory_gb_s
    for name in ("link_gb_s", "host_gb_s"):
        _refuse_fast_link(asked.model_dump()[name], memory_gb_s, f"{key}.{name}")
    entry = _by_device(asked, parts)
    _refuse_gaps(entry, chip, key, alone=_one_machine(pools, asked) and entry.nodes == 1)
    if entry.node is not None and entry.nodes > 1:
        raise ConfigError(f"{key}.nodes", entry.nodes, "1 beside node, which names one machine")
    if entry.link_gb_s is not None:
        chip = replace(chip, link_gb_s=entry.link_gb_s)
    network = entry.network_gbit or chip.network_gbit_s
    return ChipPool(
        chip=chip,
        num_nodes=entry.nodes,
        chips_per_node=entry.chips_per_node,
        network_gbit_s=network or _UNUSED_GBIT_S,
        has_network=bool(network),
        oversubscription=entry.oversubscription,
        network_latency_s=entry.latency_us / 1e6,
        node=entry.node or "",
        price_per_hour=entry.price_per_hour,
        mtbf_hours=entry.mtbf_hours,
        host_gib=entry.host_gib,
        host_gb_s=entry.host_gb_s,
        disk_gb_s=entry.disk_gb_s,
        hosts=_hosts(entry, f"{key}.hosts"),
    )


def _one_machine(pools: Sequence[PoolEntry], asked: PoolEntry) -> bool:
    """All pools that are at the site of one are in its machine."""
    near = ((pool.node, number) for number, pool in enumerate(pools) if pool.site == asked.site)
    return len({(node, "" if node else number) for node, number in near}) == 1


def _hosts(entry: PoolEntry, key: str) -> tuple[str, ...]:
    names = host_names(entry.hosts, key)
    if names and len(names) != entry.nodes:
        expected = f"a name for each of the {entry.nodes} nodes"
        raise ConfigError(key, f"{len(names)} names", expected)
    return names


def _by_device(entry: PoolEntry, parts: int) -> PoolEntry:
    """What is said of packages, as it is of each of their devices."""

    def each(value: float | None) -> float | None:
        return None if value is None else value / parts

    return entry.model_copy(
        update={
            "chips_per_node": entry.chips_per_node * parts,
            "network_gbit": each(entry.network_gbit),
            "link_gb_s": each(entry.link_gb_s),
            "host_gb_s": each(entry.host_gb_s),
            "price_per_hour": each(entry.price_per_hour),
            "mtbf_hours": entry.mtbf_hours and parts * entry.mtbf_hours,
        }
    )


_UNUSED_GBIT_S = 1.0
"""Of a pool that has no other to talk to."""


def _refuse_gaps(entry: PoolEntry, chip: Chip, key: str, *, alone: bool) -> None:
    """Rates of links that are used; a data sheet that lacks the chip's own is not in catalogues."""
    lacks = []
    if (entry.chips_per_node > 1 or entry.node) and not (entry.link_gb_s or chip.link_gb_s):
        lacks.append("link_gb_s")
    if not alone and not (entry.network_gbit or chip.network_gbit_s):
        lacks.append("network_gbit")
    if lacks:
        hint = f"The catalogue does not know it for {chip.name}: give it here."
        raise ConfigError(f"{key}.{lacks[0]}", None, "a number > 0", hint)

"""What the ranks of a run compute on, as far as predictions need it. No torch.

Rates come from a profile of the chip where there is one (``weft chips profile``), else from the
catalogue; those of a CPU without a profile are rates of an average core.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from pathlib import Path

from weft.cluster.cluster import HOST, Chip, Node
from weft.cluster.cluster_file import ClusterFile, Core, lab_view, read_view
from weft.cluster.topology import between_machines, saved_links, topology_folder
from weft.cluster.view import ChipPool, ClusterView
from weft.config.errors import ConfigError
from weft.cost.profile import Profile
from weft.cost.profile_file import profiles_folder
from weft.cost.timing import Hardware
from weft.platform.registry import PLATFORMS
from weft.simulate.known import knowledge_of, knowledge_of_local, local_profile, local_view
from weft.simulate.step import Knowledge

CLUSTER_VARIABLE = "WEFT_CLUSTER"
"""Names the file of the cluster that a launcher started this process on; a lab sets it."""
GUESSED_NETWORK_GBIT = 10.0
"""Between machines that no file describes."""
GUESSED_NETWORK_LATENCY_S = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class RankChips:
    """A chip for each rank, in their order."""

    view: ClusterView
    knowledge: Knowledge
    basis: tuple[str, ...]
    """Where rates come from, in words."""
    is_guess: bool = False
    """Some have no profile: plans may be compared, but no time is predicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Consecutive ranks on one machine."""

    node: Node
    devices: Sequence[str]
    """What each of the ranks computes on."""
    profile: Profile | None
    """Of its processor's core."""
    threads: int
    """Of each rank that computes on the processor."""

    @property
    def cores(self) -> Profile | None:
        """Of a rank: its threads, as far as there are cores for them."""
        if self.profile is None:
            return None
        threads = min(self.threads, self.node.cores / len(self.devices))
        return self.profile.scaled(threads / self.profile.machine.threads)


def chips_of_machines(machines: Sequence[Machine]) -> RankChips:
    """The chips of ranks on these machines, in their order.

    Raises:
        ConfigError: a machine has fewer GPUs than its ranks ask for, or the device is not known.
    """
    parts = [_part(machine) for machine in machines]
    if len(parts) == 1:
        return parts[0]
    pools = [
        replace(pool, node=pool.node and f"{pool.node} {number}")
        for number, part in enumerate(parts)
        for pool in part.view.pools
    ]
    late, rate, network = _between([machine.node.host for machine in machines])
    hardware = {
        name: _over_network(hardware, late, rate)
        for part in parts
        for name, hardware in part.knowledge.hardware.items()
    }
    return RankChips(
        view=ClusterView(tuple(_merged(pools))),
        knowledge=replace(parts[0].knowledge, hardware=hardware),
        basis=(*dict.fromkeys(chain.from_iterable(part.basis for part in parts)), network),
        is_guess=any(part.is_guess for part in parts),
    )


def chips_of_file(path: Path, node: Node, ranks: int) -> RankChips:
    """The chips that a cluster file describes; those of a lab are parts of this machine's cores.

    Raises:
        ConfigErrors: the file cannot be used.
        ConfigError: it describes more or fewer chips than there are ranks.
    """
    profile = local_profile(node)
    view = _different_names(read_view(path, core=_core(profile)))
    if view.world_size != ranks:
        expected = f"a file that describes {ranks} chips, one for each process"
        raise ConfigError("cluster", str(path), expected, f"It has {view.world_size}.")
    if not all(pool.chip.device == HOST for pool in view.pools):
        own = knowledge_of(view)
        names = dict.fromkeys(pool.chip.name for pool in view.pools)
        told = (_source(name, own) for name in names if name in own.hardware or name in own.chips)
        return RankChips(view=view, knowledge=own, basis=(f"{path}", *told))
    return _parts_of_cores(view, profile, node, f"{path}")


def chips_of_lab(cluster: ClusterFile, node: Node) -> RankChips:
    """The chips that a lab plays: parts of this machine's cores."""
    profile = local_profile(node)
    view = _different_names(lab_view(cluster, _core(profile)))
    return _parts_of_cores(view, profile, node, "the lab's cluster")


def _parts_of_cores(
    view: ClusterView, profile: Profile | None, node: Node, source: str
) -> RankChips:
    basis = (source, _source_of_cores(profile, node))
    host_bytes_s = (profile and profile.sending_bytes_s) or _core(profile).loopback_gb_s * 1e9
    if profile is None:
        knowledge = Knowledge(host_bytes_s=host_bytes_s)
        return RankChips(view=view, knowledge=knowledge, basis=basis, is_guess=True)
    parts = {
        pool.chip.name: profile.scaled(pool.speed).shared(view.world_size) for pool in view.pools
    }
    knowledge = replace(
        knowledge_of_local(profile, view.world_size),
        hardware={},
        chips=parts,
        software=profile.software,
        host_bytes_s=host_bytes_s,
    )
    return RankChips(view=view, knowledge=knowledge, basis=basis)


def _different_names(view: ClusterView) -> ClusterView:
    """Chips that a lab calls the same and runs at different speeds get different names."""
    kinds = {(pool.chip.name, pool.speed) for pool in view.pools}
    speeds = Counter(name for name, _ in kinds)
    pools = [
        replace(pool, chip=replace(pool.chip, name=f"{pool.chip.name} at {pool.speed:g}"))
        if speeds[pool.chip.name] > 1
        else pool
        for pool in view.pools
    ]
    return ClusterView(tuple(pools))


def _between(hosts: Sequence[str]) -> tuple[float, float, str]:
    """Seconds that a message between these machines is late, bytes a second, and how that is
    known."""
    links = saved_links(topology_folder(profiles_folder()), hosts)
    found = None if links is None else between_machines(links)
    if links is None or found is None:
        guess = f"a guess of {GUESSED_NETWORK_GBIT:g} Gbit/s between machines"
        return GUESSED_NETWORK_LATENCY_S, GUESSED_NETWORK_GBIT / 8 * 1e9, guess
    late, rate = found
    return late, rate, f"{rate * 8e-9:.3g} Gbit/s between machines, measured {links.date}"


def _over_network(hardware: Hardware, late_s: float, bytes_s: float) -> Hardware:
    fabric = replace(hardware.fabric, across_bytes_s=bytes_s, across_latency_s=late_s)
    return replace(hardware, fabric=fabric)


def _part(machine: Machine) -> RankChips:
    """The ranks of one machine."""
    devices = machine.devices
    pools: list[ChipPool] = []
    knowledge, basis, is_guess = Knowledge(), [], False
    cards = iter(machine.node.chips)
    runs = [(device, len(list(same))) for device, same in groupby(devices)]
    for device, count in runs:
        if device == HOST:
            (pool,) = local_view(machine.node, machine.cores, len(devices)).pools
            pools.append(replace(pool, chips_per_node=count))
            own = knowledge_of_local(machine.cores, devices.count(HOST))
            is_guess = is_guess or machine.profile is None
            basis.append(_source_of_cores(machine.profile, machine.node))
        elif device in PLATFORMS and PLATFORMS[device].detects_chips:
            pools += _cards(machine, device, list(islice(cards, count)), count)
            own = knowledge_of(ClusterView(tuple(pools)))
            basis += [_source(pool.chip.name, own) for pool in pools if pool.chip.device != HOST]
        else:
            known = (each.name for each in PLATFORMS.imported() if each.detects_chips)
            expected = " or ".join([HOST, *known])
            hint = "There are no rates for other chips here."
            raise ConfigError("device", device, expected, hint)
        knowledge = replace(
            knowledge,
            hardware={**knowledge.hardware, **own.hardware},
            overheads={**knowledge.overheads, **own.overheads},
        )
    if len(pools) > 1:
        pools = [*_together(pools)]
    return RankChips(
        view=ClusterView(tuple(pools)),
        knowledge=knowledge,
        basis=tuple(dict.fromkeys(basis)),
        is_guess=is_guess,
    )


def _together(pools: Sequence[ChipPool]) -> Iterator[ChipPool]:
    """In one machine: where nobody knows a chip's link, it is as the slowest of the others."""
    known = [pool.chip.link_gb_s for pool in pools if pool.chip.link_gb_s is not None]
    slowest = min(known, default=None)
    for pool in pools:
        link = slowest if pool.chip.link_gb_s is None else pool.chip.link_gb_s
        yield replace(pool, node="machine", chip=replace(pool.chip, link_gb_s=link))


def _cards(machine: Machine, device: str, chips: Sequence[Chip], count: int) -> Iterator[ChipPool]:
    if len(chips) < count:
        seen = len(machine.node.chips)
        raise ConfigError("compute.device", device, f"a GPU for each rank ({seen} seen)")
    for chip, same in groupby(chips):
        many, host_gib = len(list(same)), machine.node.memory_gib
        yield ChipPool(chip=chip, num_nodes=1, chips_per_node=many, host_gib=host_gib)


def _merged(pools: Sequence[ChipPool]) -> Iterator[ChipPool]:
    """Equal neighbouring machines as one pool."""
    for pool, same in groupby(pools):
        count = len(list(same))
        if pool.node:
            yield from [pool] * count
        else:
            yield replace(pool, num_nodes=count)


def _core(profile: Profile | None) -> Core:
    """What a lab's chips are parts of."""
    if profile is None:
        return Core()
    return Core(
        tflops=profile.peak_flops("fp32") / 1e12,
        memory_gb_s=profile.memory_bytes_s / 1e9,
        loopback_gb_s=profile.link_bytes_s / 1e9,
    )


def _source(name: str, knowledge: Knowledge) -> str:
    if name in knowledge.chips:
        return f"the cost function of {name}, from its vendor's package"
    return f"{'a profile' if name in knowledge.hardware else 'the catalogue'} of {name}"


def _source_of_cores(profile: Profile | None, node: Node) -> str:
    if profile is None:
        return f"an average core, as this CPU has no profile ({node.cpu})"
    return f"a profile of {profile.name} ({profile.machine.date})"

"""This machine as a cluster, and what profiles know of the chips of any cluster."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from weft.cluster.cluster import Chip, Node
from weft.cluster.view import ChipPool, ClusterView
from weft.cost.profile import Profile
from weft.cost.profile_file import saved_profiles
from weft.simulate.packaged import Packaged, cost_of_package
from weft.simulate.step import Knowledge

GUESSED_TFLOPS = 0.06
"""Of one core in fp32, where nothing was measured: 2 vector units of 16 lanes at 2 GHz, half."""
GUESSED_MEMORY_GB_S = 8.0
GUESSED_LINK_GB_S = 2.0


VENDORS = "weft.chips"
"""An installed package names its chips here: ``"X1-96GB" = "weft_x1:cost_function"``, something
that takes nothing and returns a cost function, or a profile."""


def core_name(node: Node) -> str:
    """What a processor's core is called among chips."""
    return f"{node.cpu} core"


def local_profile(
    node: Node, *, chip: str | None = None, folder: Path | None = None
) -> Profile | None:
    """The newest profile of this machine's chip (None: of its processor's core).

    One measured on another machine with the same chip serves where this one has none.
    """
    name = chip or core_name(node)
    found = [profile for _, profile in saved_profiles(folder) if profile.name == name]
    own = [profile for profile in found if profile.machine.host == node.host]
    return next(iter([*own, *found]), None)


def local_view(node: Node, profile: Profile | None, ranks: int) -> ClusterView:
    """This machine's processor as a pool: each of ``ranks`` runs on threads of its own.

    Without a profile rates are those of an average core.
    """
    fp32 = GUESSED_TFLOPS if profile is None else profile.peak_flops("fp32") / 1e12
    bf16 = 0.0 if profile is None else profile.peak_flops("bf16") / 1e12
    memory = GUESSED_MEMORY_GB_S if profile is None else profile.memory_bytes_s / 1e9
    link = GUESSED_LINK_GB_S if profile is None else profile.link_bytes_s / 1e9
    chip = Chip(
        name=core_name(node) if profile is None else profile.name,
        vendor="CPU",
        memory_gib=node.memory_gib / ranks,
        peak_tflops={"fp32": fp32, "bf16": bf16 or fp32},
        measured_tflops={},
        memory_gb_s=memory,
        link="host memory",
        link_gb_s=link,
        network_gbit_s=8 * link,
        confidence="none" if profile is None else "high",
        notes="guessed from its class" if profile is None else f"measured {profile.machine.date}",
    )
    return ClusterView((ChipPool(chip=chip, num_nodes=1, chips_per_node=ranks),))


def knowledge_of(cluster: ClusterView, folder: Path | None = None) -> Knowledge:
    """What is known of a cluster's chips besides the catalogue, by name.

    A profile measured here comes first, then what an installed package of the chip's vendor says;
    other chips get their class's rates.
    """
    newest: dict[str, Profile] = {}
    for _, profile in saved_profiles(folder):
        newest.setdefault(profile.name, profile)
    hardware, overheads, chips = {}, {}, {}
    for pool in cluster.pools:
        name = pool.chip.name
        cost = newest.get(name) or _from_vendor(name)
        if isinstance(cost, Profile):
            hardware[name] = cost.shared(pool.chips_per_node).hardware(pool.chips_per_node)
            overheads[cost.machine.device] = cost.overheads
        elif cost is not None:
            chips[name] = cost
    return Knowledge(chips=chips, hardware=hardware, overheads=overheads)


def _from_vendor(name: str) -> Profile | Packaged | None:
    """What the package of a chip's vendor brings; it is imported now, and no other.

    Raises:
        ConfigError: it cannot be imported or made, or does not cost operations.
    """
    found = entry_points(group=VENDORS)
    return cost_of_package(f"{VENDORS}: {name}", found[name]) if name in found.names else None


def knowledge_of_local(profile: Profile | None, ranks: int) -> Knowledge:
    """For ``local_view`` of the same machine and number of ranks."""
    if profile is None:
        return Knowledge()
    return Knowledge(
        hardware={profile.name: profile.shared(ranks).hardware(ranks)},
        overheads={profile.machine.device: profile.overheads},
    )

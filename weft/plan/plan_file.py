"""A plan in a file, and the chips that its ranks were planned for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from weft.cluster.host_names import refuse_no_host
from weft.cluster.view import ChipPool, ClusterView
from weft.config.errors import ConfigError
from weft.plan.plan import Plan

FORMAT = 1
"""Of what stands beside the plan; a file without it is a plan alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesUsed:
    """Like nodes of one pool of a cluster, as far as a plan uses their chips."""

    chip: str
    """Name of their chips."""
    pool: int
    """Number of the pool in the cluster."""
    nodes: int
    chips_per_node: int
    node: str = ""
    """Of others in the same machine: what both are called."""
    hosts: tuple[str, ...] = ()
    """Names of these nodes; empty where nobody said them."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.chips_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFile:
    """A plan, and the chips that its ranks count through."""

    plan: Plan
    chips: tuple[NodesUsed, ...] = ()
    """Empty: it does not say, and ranks count through all chips that there are."""

    def nodes_of(self, rank: int) -> NodesUsed | None:
        """Where a rank is to run; None where the file does not say it."""
        first = 0
        for used in self.chips:
            if rank < first + used.ranks:
                return used
            first += used.ranks
        return None

    def to_data(self) -> dict[str, Any]:
        """As JSON has it: a plan with more beside it, which ``read`` takes back."""
        plan: dict[str, Any] = json.loads(self.plan.to_json())
        if not self.chips:
            return plan
        chips = [asdict(each) | {"hosts": list(each.hosts)} for each in self.chips]
        return {"format": FORMAT, **plan, "chips": chips}

    @staticmethod
    def read(text: str) -> PlanFile:
        """Read a plan, what ``to_data`` gave, or what ``weft plan --json`` printed around it.

        Raises:
            ValidationError: it is none of them.
            ValueError: it is of a later format, or has a host that is none.
            KeyError, TypeError: it has keys that plans do not have.
        """
        try:
            data = json.loads(text)
        except ValueError:
            data = None  # pydantic says what is wrong, and where
        beside: dict[str, Any] = {}
        if isinstance(data, dict):
            inner = data.get("plan")
            data = inner if isinstance(inner, dict) else data
            beside = {key: data.pop(key) for key in ("format", "chips") if key in data}
            text = json.dumps(data)
        if beside.get("format", FORMAT) != FORMAT:
            raise ValueError(f"format: {beside['format']!r} is not {FORMAT}")
        TypeAdapter(Plan).validate_json(text, strict=True)
        chips = TypeAdapter(tuple[NodesUsed, ...]).validate_python(beside.get("chips", ()))
        for number, used in enumerate(chips):
            for host in used.hosts:
                refuse_no_host(host, f"chips[{number}].hosts")
        return PlanFile(plan=Plan.from_json(text), chips=chips)


def nodes_used(used: ClusterView, cluster: ClusterView) -> tuple[NodesUsed, ...]:
    """``used``, of which each pool is a part of a pool of ``cluster``, in words that last."""
    return tuple(_nodes_used(used, cluster))


def _nodes_used(used: ClusterView, cluster: ClusterView) -> Iterator[NodesUsed]:
    taken: Counter[int] = Counter()
    for part in used.pools:
        number = next(n for n, pool in enumerate(cluster.pools) if _is_part(part, pool))
        first = taken[number]
        taken[number] += 0 if part.node else part.num_nodes
        yield NodesUsed(
            chip=part.chip.name,
            pool=number,
            nodes=part.num_nodes,
            chips_per_node=part.chips_per_node,
            node=part.node,
            hosts=part.hosts[first : first + part.num_nodes],
        )


def _is_part(part: ChipPool, pool: ChipPool) -> bool:
    """Some of its nodes, or some chips of its node, with their part of what the host has."""
    whole = replace(part, num_nodes=pool.num_nodes, chips_per_node=pool.chips_per_node)
    whole = replace(whole, host_gib=pool.host_gib, disk_gb_s=pool.disk_gb_s)
    return replace(whole, node=pool.node) == pool


def view_used(chips: Sequence[NodesUsed], cluster: ClusterView) -> ClusterView:
    """The opposite of ``nodes_used``, on the same cluster or one with the same chips.

    Raises:
        ConfigError: the cluster lacks some of them.
    """
    return ClusterView(tuple(_parts(chips, cluster)))


def _parts(chips: Sequence[NodesUsed], cluster: ClusterView) -> Iterator[ChipPool]:
    taken: Counter[int] = Counter()
    for number, used in enumerate(chips):
        wanted = used.ranks
        order = sorted(range(len(cluster.pools)), key=lambda pool: pool != used.pool)
        found = next((n for n in order if _has(cluster.pools[n], used, taken[n] + wanted)), None)
        if found is None:
            value = f"{used.nodes} x {used.chips_per_node} {used.chip}"
            there = ", ".join(
                f"{pool.num_nodes} x {pool.chips_per_node} {pool.chip.name}"
                for pool in cluster.pools
            )
            hint = f"It has {there}."
            raise ConfigError(f"chips[{number}]", value, "chips of the cluster", hint)
        taken[found] += wanted
        yield replace(
            cluster.pools[found],
            num_nodes=used.nodes,
            chips_per_node=used.chips_per_node,
            node=used.node,
        )


def _has(pool: ChipPool, used: NodesUsed, num_chips: int) -> bool:
    """So many chips in all, of that name, on nodes that are large enough."""
    return (
        pool.chip.name == used.chip
        and pool.num_nodes >= used.nodes
        and pool.chips_per_node >= used.chips_per_node
        and pool.num_chips >= num_chips
    )

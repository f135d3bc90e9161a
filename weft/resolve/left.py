"""The plan for what is left of a machine, after some of a job's ranks were lost. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.cluster.cluster import Cluster, Node
from weft.config.errors import ConfigError
from weft.config.load import Loaded
from weft.config.sections import Config
from weft.plan.plan import Plan
from weft.planner.search import NoPlan
from weft.resolve.planned import choose, resources_of_ranks
from weft.resolve.resolve import Resolved, resolve


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """What goes on."""

    resolved: Resolved
    """Its cluster has the chips of the ranks that are left."""
    seats: tuple[int, ...]
    """For each rank of the plan the one that its process was before."""
    why: str
    """What the planner says of the plan."""


def plan_for_left(loaded: Loaded, now: Resolved, left: Sequence[int]) -> Left:
    """What ``plan: auto`` chooses for the chips of these ranks, in order: for the same batch, in
    the same arithmetic. All of them have work, if any such plan fits.

    Raises:
        NoPlan: nothing fits.
        ConfigErrors: there are no rates of such chips, or stages compute in several precisions.
    """
    (node,) = now.cluster.nodes
    node = _with_chips_of(node, now.plan, left)
    try:
        config = _asked(loaded.config, now.plan)
        there = resources_of_ranks(config, node, [now.plan.devices[rank] for rank in left])
        try:
            chosen = choose(config, there)
        except NoPlan:
            if len(there.chips.view.pools) > 1:
                raise
            chosen = choose(config, replace(there, may_idle=True))
    except ConfigError as error:
        raise loaded.place(error) from error
    cluster = Cluster(nodes=(node,))
    resolved = resolve(loaded, cluster, plan=chosen.plan, why=chosen.notes)
    seats = tuple(left[: chosen.plan.world_size])
    return Left(resolved=resolved, seats=seats, why=chosen.notes[0])


def cards_of(plan: Plan) -> tuple[int, ...]:
    """For each rank how many of its machine's devices of its family the ranks before it have."""
    devices = plan.devices
    return tuple(devices[:rank].count(device) for rank, device in enumerate(devices))


def _with_chips_of(node: Node, plan: Plan, ranks: Sequence[int]) -> Node:
    """A machine with no other accelerators than these ranks have."""
    kept = {(plan.devices[rank], cards_of(plan)[rank]) for rank in ranks}
    families = [chip.device for chip in node.chips]
    numbered = (
        (each, (each.device, families[:n].count(each.device))) for n, each in enumerate(node.chips)
    )
    return replace(node, chips=tuple(chip for chip, card in numbered if card in kept))


def _asked(config: Config, plan: Plan) -> Config:
    """For the planner: what a person asked it, or nothing but the batch beside another plan."""
    precisions = sorted({stage.precision for _, _, stage in plan.stages()})
    if len(precisions) > 1:
        expected = "stages of one precision, to plan again for fewer ranks"
        raise ConfigError("compute.precision", precisions, expected)
    asked = config.model_dump(mode="json")
    asked["compute"] |= {"precision": precisions[0], "device": "auto"}
    if config.plan.auto is None:
        asked["plan"] = {"auto": {}}
        asked["batch"] = {"samples": plan.global_batch, "micro": None, "accumulation": None}
    return Config.model_validate(asked)

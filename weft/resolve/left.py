"""The plan for what is left of a machine, after some of a job's ranks were lost. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from weft.cluster.cluster import Cluster
from weft.config.errors import ConfigError
from weft.config.load import Loaded
from weft.config.sections import Config
from weft.config.values import Section
from weft.plan.plan import Plan
from weft.planner.expert_places import refuse_idle_moves
from weft.planner.search import NoPlan, Watch
from weft.planner.shares import refuse_unbalanced
from weft.planner.sites import sites_still, without_lost
from weft.resolve.planned import (
    Chosen,
    Resources,
    choose,
    problem_of,
    resources_of_facts,
    resources_of_ranks,
)
from weft.resolve.resolve import Resolved, resolve
from weft.resolve.tiers import has_files

SEARCHING_S = 60.0
"""For a plan of what is left, which is the best by then: meanwhile nothing trains."""
WORTH_LEAVING = 0.05
"""Part of a step that has to be saved where ranks that could work are left out."""


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
    the same arithmetic. All of them have work, if any such plan fits, unless they are of one kind
    and clearly faster without some. Of a plan with sites what is whole goes on as it is.

    Args:
        now: Its cluster has the chips of its ranks, in their order.

    Raises:
        NoPlan: nothing fits.
        ConfigErrors: there are no rates of such chips, or stages compute in several precisions.
    """
    if now.plan.sites:
        return _of_sites(loaded, now, left)
    cluster, devices = _chips_of(now, left)
    (node,) = cluster.nodes
    try:
        config = asked_again(loaded.config.model_copy(update={"sites": None}), now.plan)
        chosen = _chosen(config, resources_of_ranks(config, node, devices))
    except ConfigError as error:
        raise loaded.place(error) from error
    asked = asking_of(loaded, chosen.plan)
    resolved = resolve(asked, cluster, plan=chosen.plan, why=chosen.notes)
    seats = tuple(left[: chosen.plan.world_size])
    return Left(resolved=resolved, seats=seats, why=chosen.notes[0])


def _chosen(config: Config, there: Resources) -> Chosen:
    """With work for all chips, if any such plan fits; of like chips without some, where that is
    clearly faster: they do not come back."""
    watch, some = Watch(seconds=SEARCHING_S), replace(there, may_idle=True)
    alike, problem = len(there.chips.view.pools) == 1, problem_of(config, there)
    try:
        whole = choose(config, there, watch=watch)
    except NoPlan:
        if not alike:
            raise
        return choose(config, some, watch=watch)
    if not alike or watch.is_over:
        return whole
    fewer = choose(config, some, watch=watch)
    whole_s, fewer_s = (problem.time(each.plan).step_s for each in (whole, fewer))
    return fewer if fewer_s < (1 - WORTH_LEAVING) * whole_s else whole


def _of_sites(loaded: Loaded, now: Resolved, left: Sequence[int]) -> Left:
    try:
        plan, why, seats = sites_left(now.plan, left)
    except ConfigError as error:
        raise loaded.place(error) from error
    cluster, _ = _chips_of(now, seats)
    resolved = resolve(asking_of(loaded, plan), cluster, plan=plan, why=[why])
    return Left(resolved=resolved, seats=seats, why=why)


def sites_left(now: Plan, left: Sequence[int]) -> tuple[Plan, str, tuple[int, ...]]:
    """The plan of whole pipelines that are left, in words, and for each of its ranks the one that
    it was.

    Raises:
        ConfigError: no pipeline is whole.
    """
    plan, before = without_lost(now, left)
    many = max(len(now.sites), 1)
    several = f"{len(plan.sites)} sites" if plan.sites else "one site, from where all last met,"
    return plan, f"{several} of {many} go on with all samples", before


def asking_of(loaded: Loaded, plan: Plan) -> Loaded:
    """What has an effect still with another plan: of the sites those that it has, a balance where
    there are several to balance, moves of experts that are divided, and a folder for what is on
    disk."""
    from weft.data.even import refuse_one_part  # which imports numpy

    config = loaded.config
    data = config.data
    if data.balance_documents and _refuses(partial(refuse_one_part, seq_len=data.seq_len), plan):
        data = data.model_copy(update={"balance_documents": False})
    balance = None if _refuses(refuse_unbalanced, plan) else config.balance
    moves, optim = config.move_experts, config.optim
    if moves and _refuses(partial(refuse_idle_moves, copies=moves.replicate), plan):
        moves = None
    if optim.state_folder and not has_files(plan):
        optim = optim.model_copy(update={"state_folder": None})
    still: dict[str, Section | None] = {"sites": sites_still(config.sites, plan)}
    still |= {"balance": balance, "data": data, "move_experts": moves, "optim": optim}
    return replace(loaded, config=config.model_copy(update=still))


def _refuses(refuse: Callable[[Plan], None], plan: Plan) -> bool:
    try:
        refuse(plan)
    except ConfigError:
        return True
    return False


def _chips_of(now: Resolved, left: Sequence[int]) -> tuple[Cluster, list[str]]:
    """The machine with the chips of these ranks alone, and what each computes on."""
    devices, cards = [now.plan.devices[rank] for rank in left], cards_of(now.plan)
    return with_chips(now.cluster, devices, [cards[rank] for rank in left]), devices


def plan_for_machines(loaded: Loaded, now: Plan, machines: Sequence[Mapping[str, Any]]) -> Chosen:
    """As ``plan_for_left``, for ranks on several machines.

    Args:
        machines: For each rank, in order, the ``facts`` of its machine.

    Raises:
        NoPlan: nothing fits.
        ConfigErrors: there are no rates of such chips, or stages compute in several precisions.
    """
    try:
        config = asked_again(loaded.config, now)
        return _chosen(config, resources_of_facts(config, machines))
    except ConfigError as error:
        raise loaded.place(error) from error


def cards_of(plan: Plan) -> tuple[int, ...]:
    """For each rank how many of its machine's devices of its family the ranks before it have."""
    devices = plan.devices
    return tuple(devices[:rank].count(device) for rank, device in enumerate(devices))


def with_chips(cluster: Cluster, devices: Sequence[str], cards: Sequence[int]) -> Cluster:
    """A machine with no other accelerators than these, in the order of the ranks that have them.

    Args:
        cards: For each rank, which of the machine's devices of its family.
    """
    (node,) = cluster.nodes
    families = {device: [c for c in node.chips if c.device == device] for device in devices}
    chips = [
        families[device][card]
        for device, card in zip(devices, cards, strict=True)
        if families[device]
    ]
    return Cluster(nodes=(replace(node, chips=tuple(chips)),))


def asked_again(config: Config, plan: Plan) -> Config:
    """For the planner: what a person asked it, or nothing but the batch beside another plan."""
    precisions = sorted({stage.precision for _, _, stage in plan.stages()})
    if len(precisions) > 1:
        expected = "stages of one precision, to plan again for fewer ranks"
        raise ConfigError("compute.precision", precisions, expected)
    asked = config.model_dump(mode="json")
    if config.plan.auto is not None:
        asked["plan"]["auto"]["ranks"] = None
    asked["compute"] |= {"precision": precisions[0], "device": "auto"}
    if config.plan.auto is None:
        asked["plan"] = {"auto": {}}
        asked["batch"] = {"samples": plan.global_batch, "micro": None, "accumulation": None}
    return Config.model_validate(asked)

"""From a configuration to what will run: read a plan's file, or let the planner choose."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cluster.cluster import Cluster, Node, catalogue
from weft.comm.address import RankAddress
from weft.config.errors import ConfigError, ConfigErrors, show
from weft.config.load import Loaded
from weft.plan.plan import Plan
from weft.plan.plan_file import PlanFile
from weft.platform.detect import detect
from weft.resolve.resolve import Resolved, read_plan, read_plan_file, resolve

if TYPE_CHECKING:
    from weft.planner.search import Watch
    from weft.resolve.planned import Chosen, Resources
    from weft.resolve.rank_chips import RankChips


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRun:
    """What will run."""

    resolved: Resolved
    chosen: Chosen | None = None
    """Where the planner chose the plan."""
    chips: RankChips | None = None
    """Of ranks on several machines, where this rank knows them; None: they are all here."""


def resolved_here(
    loaded: Loaded, *, out: Path | None = None, may_plan: bool = False, quiet: bool = False
) -> ResolvedRun:
    """With every rank on this machine.

    Args:
        out: The run folder, whose plan is kept where the planner would be asked the same again.
        may_plan: Several accelerators that nobody gave a plan for are the planner's.
        quiet: Not told how far a search is.

    Raises:
        ConfigErrors: something that cannot work, with the place where it was given.
    """
    cluster, problem = detect(), ""
    if may_plan and len(cluster.nodes[0].chips) > 1:
        from weft.planner.search import NoPlan
        from weft.resolve.planned import planned_for

        planned, note = planned_for(loaded, cluster)
        try:
            if note:
                return _chosen(planned, cluster, out, note, quiet=quiet)
        except ConfigErrors as errors:
            (error, *_) = errors.errors
            if isinstance(error, NoPlan):
                raise
            problem = f"the planner cannot choose a plan for these chips: {error}"
    if loaded.config.plan.auto is not None:
        return _chosen(loaded, cluster, out, quiet=quiet)
    resolved = resolve(loaded, cluster, plan=read_plan(loaded), makes=makes_orders(None))
    notes = (*resolved.notes, *filter(None, [problem]))
    return ResolvedRun(resolved=replace(resolved, notes=notes))


def makes_orders(ranks_here: int | None) -> Callable[[Resolved], Resolved]:
    """Makes the orders that a run asks for, of whose ranks so many are here; None: all. What that
    takes is imported then."""

    def made(resolved: Resolved) -> Resolved:
        from weft.resolve.orders import ordered
        from weft.resolve.prediction import chips_of_run

        return ordered(resolved, chips_of_run(resolved, ranks_here))

    return made


def _chosen(
    loaded: Loaded, cluster: Cluster, out: Path | None, *notes: str, quiet: bool
) -> ResolvedRun:
    """The planner chooses for this machine."""
    from weft.resolve.planned import choose, resources_here

    try:
        resources = resources_here(loaded.config, cluster)
        chosen = choose(loaded.config, resources, out, watch=_watch(quiet=quiet))
    except ConfigError as error:
        raise loaded.place(error) from error
    resolved = resolve(loaded, cluster, plan=chosen.plan, why=[*notes, *chosen.notes])
    return ResolvedRun(resolved=resolved, chosen=chosen)


def _watch(*, quiet: bool) -> Watch:
    """Over the search of a command, which says how far it is."""
    from weft.cli.plan.waiting import telling
    from weft.planner.search import Watch

    return Watch() if quiet else telling()


def resolved_among(
    loaded: Loaded,
    address: RankAddress,
    until_joined: ExitStack,
    *,
    out: Path | None = None,
    quiet: bool = False,
) -> ResolvedRun:
    """As one rank of a job that another launcher started: rank 0 plans for all.

    Args:
        until_joined: Not to be left before this rank has met the others.

    Raises:
        ConfigErrors: something that cannot work, with the place where it was given.
    """
    cluster = detect()

    def resolved(plan: Plan | None, why: Sequence[str] = ()) -> Resolved:
        here = address.ranks_here
        world_size = address.world_size
        return resolve(
            loaded,
            cluster,
            world_size=world_size,
            ranks_here=here,
            plan=plan,
            why=why,
            makes=makes_orders(here),
        )

    if loaded.config.plan.auto is None:
        file = read_plan_file(loaded)
        if file is not None:
            _refuse_elsewhere(loaded, file, address, cluster.nodes[0])
        return ResolvedRun(resolved=resolved(None if file is None else file.plan))
    from weft.comm.agreement import DECISION_S, agree
    from weft.comm.rendezvous import Rendezvous
    from weft.resolve.planned import Chosen, choose, facts

    resources: list[Resources] = []

    def decide(everyone: Sequence[Mapping[str, Any]]) -> str:
        resources.append(_resources(loaded, cluster, everyone))
        watch = _watch(quiet=quiet).within(DECISION_S / 2)
        return choose(loaded.config, resources[0], out, watch=watch).to_json()

    try:
        mine = facts(cluster, address.host)
        if address.world_size == 1:
            said = decide([mine])
        else:
            rendezvous = Rendezvous(address, loaded.config.train.timeout_s)
            said = agree(until_joined.enter_context(rendezvous), mine, decide)
        chosen = Chosen.from_json(said)
    except ConfigError as error:
        raise loaded.place(error) from error
    chips = resources[0].chips if resources else None
    return ResolvedRun(resolved=resolved(chosen.plan, chosen.notes), chosen=chosen, chips=chips)


def resolved_on_nodes(
    loaded: Loaded,
    seats: Sequence[Mapping[str, Any]],
    *,
    ranks_here: int,
    out: Path | None = None,
    quiet: bool = False,
) -> ResolvedRun:
    """With ranks on the machines that these facts are of, one for each rank that may be there, in
    order. A plan that somebody gave may leave the last ones to spare.

    Raises:
        ConfigErrors: something that cannot work, with the place where it was given.
    """
    from weft.resolve.planned import choose, resources_of_facts

    cluster, config = detect(), loaded.config
    asked, file = config.plan, read_plan_file(loaded)
    plan = None if file is None else file.plan
    if asked.auto is not None:
        ranks = asked.auto.ranks or len(seats)
    elif plan is None and asked.batch_shares is None:
        ranks = len(seats)
    else:
        derived = partial(resolve, loaded, cluster, ranks_here=ranks_here, makes=lambda same: same)
        ranks = (plan or derived().plan).world_size
    if ranks > len(seats):
        hint = "Start it on more machines, or with a larger --nproc-per-node."
        expected = f"at most {len(seats)} ranks, as the machines that came have places for"
        raise loaded.place(ConfigError("plan", {"ranks": ranks}, expected, hint))
    here = min(ranks, ranks_here)
    if asked.auto is None:
        makes = makes_orders(here)
        known = resolve(loaded, cluster, world_size=ranks, ranks_here=here, plan=plan, makes=makes)
        return ResolvedRun(resolved=known)
    try:
        resources = resources_of_facts(config, seats[:ranks])
        chosen = choose(config, resources, out, watch=_watch(quiet=quiet))
    except ConfigError as error:
        raise loaded.place(error) from error
    known = resolve(
        loaded, cluster, world_size=ranks, ranks_here=here, plan=chosen.plan, why=chosen.notes
    )
    return ResolvedRun(resolved=known, chosen=chosen, chips=resources.chips)


def _refuse_elsewhere(loaded: Loaded, file: PlanFile, address: RankAddress, node: Node) -> None:
    """What was planned is what is run: each rank on its host, and on its kind of chip.

    Raises:
        ConfigErrors: the plan has this machine for other ranks, or another chip for this rank.
    """
    planned = file.nodes_of(address.rank)
    if planned is None:
        return
    here, place = node.host.partition(".")[0], address.local_rank
    mine, others = (
        {host.partition(".")[0] for used in some for host in used.hosts}
        for some in ([planned], file.chips)
    )
    card = node.chips[place].name if place < len(node.chips) else ""
    if here in others - mine:
        expected = f"rank {address.rank} on {show(list(planned.hosts[:4]))}, as it was planned"
        problem = f"It runs on {node.host}: give each node its own command."
    elif {card, planned.chip} <= set(catalogue()) and card != planned.chip:
        expected = f"a plan for what is here ({card})"
        problem = f"Rank {address.rank} was planned on {planned.chip}."
    else:
        return
    raise loaded.place(ConfigError("plan.file", loaded.config.plan.file, expected, problem))


def _resources(
    loaded: Loaded, cluster: Cluster, everyone: Sequence[Mapping[str, Any]]
) -> Resources:
    """What rank 0 plans for."""
    from weft.resolve.planned import resources_of_facts, resources_of_file
    from weft.resolve.rank_chips import CLUSTER_VARIABLE

    auto = loaded.config.plan.auto
    file = (auto and auto.cluster) or os.environ.get(CLUSTER_VARIABLE)
    if file:
        return resources_of_file(loaded.config, Path(file), cluster, len(everyone))
    return resources_of_facts(loaded.config, everyone)


def refuse_unmeasured(
    loaded: Loaded, resolved: Resolved, busy_s: Sequence[float], problem: str
) -> None:
    """``recovery.alarm: replan`` where nothing could be planned again.

    Args:
        busy_s: What was predicted of each rank.
        problem: Why nothing was.

    Raises:
        ConfigErrors: it could not.
    """
    from weft.resolve.paced import refuse_unknown
    from weft.train.loop import waits_for_reads

    waits = waits_for_reads(resolved.plan)
    try:
        refuse_unknown(resolved, busy_s, problem, reads_wait=waits)
    except ConfigError as error:
        raise loaded.place(error) from error

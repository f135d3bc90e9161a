"""Domains in a search: looked for throughout on few chips, priced for the best plans of many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from weft.cluster.view import ClusterView, Site
from weft.cost.choice import ways_of_domains
from weft.cost.memory import Memory
from weft.plan.plan import Plan
from weft.planner.fit import short_hosts
from weft.planner.problem import Problem
from weft.planner.search.found import Candidate

FEW_CHIPS = 32
"""Up to which every plan is looked at with domains and without."""
BEST_FEW = 3
"""Plans that are priced with domains where there are more chips."""

Kind = str
"""Of what a domain has all ranks, in words."""


@dataclass(frozen=True, slots=True)
class Apart:
    """A plan with domains."""

    kind: Kind
    plan: Plan


def searches_domains(problem: Problem) -> bool:
    """They are looked for throughout."""
    few = problem.cluster.world_size <= FEW_CHIPS
    return problem.options.domains and few and has_slower_links(problem)


def has_slower_links(problem: Problem) -> bool:
    """Some chips are joined by slower links than others."""
    pools = problem.cluster.pools
    nodes = {pool.node or f"pool {number}" for number, pool in enumerate(pools)}
    if len(nodes) == 1 and pools[0].num_nodes == 1:
        return False
    rates = set()
    for pool in pools:
        fabric = problem.knowledge.hardware_of(pool).fabric
        rates |= {fabric.across_bytes_s}
        rates |= {fabric.inside_bytes_s} if pool.chips_per_node > 1 else set()
        rates |= {way.bytes_s for way in fabric.ways_out} if problem.cluster.sites else set()
    return len(rates) > 1


def domains_of_kinds(plan: Plan, cluster: ClusterView) -> Iterator[Apart]:
    """A plan with the domains that may make it faster, each set of them once: where several ranks
    of a domain hold the same as ranks of others do."""
    pipeline_of = {rank: p for p, _, stage in plan.stages() for rank in stage.mesh.ranks}
    keys: dict[Kind, Callable[[int], object]] = {
        "pipeline": pipeline_of.__getitem__,
        "kind of chip": lambda rank: cluster.pool_of(rank).chip.name,
        "node": cluster.node_of,
        "site": cluster.site_of,
    }
    for out in range(1, max((len(site.around) for site in cluster.sites), default=0)):
        keys[f"site, {out} level{'s' * (out > 1)} out"] = partial(_outwards, cluster, out)
    seen: set[tuple[tuple[int, ...], ...]] = {()}
    for kind, key in keys.items():
        domains = _by(key, plan.world_size)
        apart = replace(plan, domains=domains if len(domains) > 1 else ())
        if apart.domains not in seen and max(ways_of_domains(apart).values()) > 1:
            yield Apart(kind, apart)
        seen.add(apart.domains)


def _outwards(cluster: ClusterView, out: int, rank: int) -> Site | None:
    """What a rank's site is in, so many levels out, or as many as there are."""
    site = cluster.site_of(rank)
    return site and site.around[min(out, len(site.around) - 1)]


def _by(key: Callable[[int], object], world_size: int) -> tuple[tuple[int, ...], ...]:
    found: dict[object, list[int]] = {}
    for rank in range(world_size):
        found.setdefault(key(rank), []).append(rank)
    return tuple(map(tuple, found.values()))


def with_best_domains(candidates: Sequence[Candidate], problem: Problem) -> list[Candidate]:
    """The candidates, fastest first; of the best few each with the domains that save most, if some
    do and its chips have room for them."""
    ordered = sorted(candidates, key=_step_s)
    if problem.options.domains and has_slower_links(problem):
        best = inf
        for number, candidate in enumerate(ordered[:BEST_FEW]):
            if candidate.plan.domains or _free_exchange_s(candidate) > best:
                continue
            there = problem.on(candidate.cluster)
            ordered[number] = min(_priced(candidate, there), key=_step_s)
            best = min(best, ordered[number].time.step_s)
    return sorted(ordered, key=_step_s)


def _step_s(candidate: Candidate) -> float:
    return candidate.time.step_s


def _free_exchange_s(candidate: Candidate) -> float:
    """A step where what is done once took no time; from level 2 on passes may be faster too."""
    if any(stage.zero >= 2 for _, _, stage in candidate.plan.stages()):
        return 0.0
    time = candidate.time
    return time.stretch * max(timeline.step_s for timeline in time.timelines)


def _priced(candidate: Candidate, problem: Problem) -> Iterator[Candidate]:
    """The candidate, and it with domains wherever they are faster and fit."""
    yield candidate
    for apart in domains_of_kinds(candidate.plan, candidate.cluster):
        time = problem.time(apart.plan)
        if time.step_s < candidate.time.step_s:
            memory = problem.memory(apart.plan)
            if have_room(apart.plan, problem, memory):
                yield replace(candidate, plan=apart.plan, time=time, memory=memory)


def lacking(memory: Mapping[int, Memory], problem: Problem) -> float:
    """Bytes that the rank that lacks most has too little of; 0 where none lacks any."""
    part = problem.options.memory_part * 2**30
    rooms = (part * problem.cluster.pool_of(rank).chip.memory_gib for rank in memory)
    both = zip(memory.values(), rooms, strict=True)
    return max(0.0, *(each.total - room for each, room in both))


def have_room(plan: Plan, problem: Problem, memory: Mapping[int, Memory]) -> bool:
    """The chips for what its ranks need, and their hosts for what waits there."""
    part = problem.options.memory_part * 2**30
    fullest = (problem.fullest(stage, memory) for _, _, stage in plan.stages())
    return all(
        memory[rank].total <= part * problem.cluster.pool_of(rank).chip.memory_gib
        for rank in fullest
    ) and not any(short_hosts(plan, problem))

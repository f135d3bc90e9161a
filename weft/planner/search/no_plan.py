"""Nothing fits: what is short by how much, and the smallest changes with which something would.

Every change is tried by a search of its own, among the plans that need least memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil, inf
from typing import Any

from weft.cluster.cluster import Chip
from weft.cluster.view import ChipPool, ClusterView
from weft.planner.problem import Problem
from weft.planner.search.found import Candidate, NoPlan

Attempt = Callable[[Problem], Candidate | None]
"""Any plan that fits, if there is one."""

_MOST = 1024
"""Times the nodes, or their memory, beyond which no change is tried."""
_ENDLESS = 2**30
"""Times the chips' memory, with which all fits that can be laid over them."""
_FINE = 1.01
_PARTS = 64
"""Of what the chips of a node have: the least of its own memory that is tried."""


def no_plan(attempt: Attempt, problem: Problem) -> NoPlan:
    """The error that says so."""
    leans = [leanest(replace(problem, options=each)) for each in problem.options.elsewhere()]

    def least_at(times: float) -> Candidate | None:
        """With as much as can be kept elsewhere, in that order."""
        tried = (attempt(lean.with_memory(times)) for lean in reversed(leans))
        return next(filter(None, tried), None)

    factor = _smallest(lambda times: least_at(times) is not None, most=_ENDLESS)
    names = [pool.chip.name for pool in problem.cluster.pools]
    if factor is None:
        pools = tuple(replace(pool, host_gib=inf) for pool in problem.cluster.pools)
        if attempt(leans[0].on(ClusterView(pools)).with_memory(_ENDLESS)) is not None:
            expected = "nodes with room in their memory for what is to wait there"
            return NoPlan("cluster", names, expected, "Say what they have: host_gib of pools.")
        expected = "chips that the model can be laid over, however much memory they had"
        return NoPlan("cluster", names, expected, _too_few_samples(problem))
    least = least_at(factor)
    assert least is not None, f"fits at {factor} times the memory, and then does not"
    stage, chip, need = _fullest(least)
    room = chip.memory_gib / factor * problem.options.memory_part
    short = (
        f"The plan that needs least puts {need:.1f} GiB on stage {stage} ({chip.name}), "
        f"{need - room:.1f} GiB more than the {room:.1f} GiB that may be planned."
    )
    ways = list(_ways_out(attempt, problem))
    gib = f"{factor:.2f} times the memory on each chip"
    hint = f"{short} It would fit with {', or with '.join([*ways, gib])}."
    return NoPlan("cluster", names, "chips with enough memory for the model", hint)


def _too_few_samples(problem: Problem) -> str:
    chips, micros = problem.cluster.world_size, problem.options.micros or (1,)
    many = "" if micros == (1,) else f", and {min(micros)} or more in a micro-batch"
    words = f"No meshes fill chips (there are {chips}) with the samples of a step"
    return f"{words} ({problem.workload.samples}{many}): more samples, or fewer chips, would do."


def leanest(problem: Problem, **changes: Any) -> Problem:
    """With what needs least memory of all that may be chosen, after ``changes`` of the options."""
    options = replace(problem.options, **changes)
    lean = replace(
        options,
        micros=(min(options.micros or (1,)),),
        schedules=("1f1b",) if "1f1b" in options.schedules else options.schedules[:1],
        recompute=("full",) if "full" in options.recompute else options.recompute,
        zero=tuple(z for z in options.zero if z in (0, max(options.zero))),
    )
    return replace(problem, options=lean)


def _ways_out(attempt: Attempt, problem: Problem) -> Iterator[str]:
    """What would do without other chips, then how many more nodes would."""
    options = problem.options
    for words, allowed, change in (
        ("recomputation", "full" in options.recompute, {"recompute": ("full",)}),
        ("ZeRO 3", 3 in options.zero, {"zero": (0, 3)}),
        ("one sample a rank", 1 in (options.micros or (1,)), {"micros": (1,)}),
    ):
        if not allowed and attempt(leanest(problem, **change)) is not None:
            yield words
    yield from _on_hosts(attempt, problem)
    lean = leanest(problem)

    def larger(times: float) -> Problem:
        pools = (_with_more_nodes(pool, times) for pool in problem.cluster.pools)
        return lean.on(ClusterView(tuple(pools)))

    times = _smallest(lambda more: attempt(larger(more)) is not None)
    if times is not None:
        pools = larger(times).cluster.pools
        names = (f"{pool.num_nodes} x {pool.chip.name}" for pool in pools)
        yield f"more nodes ({', '.join(names)})"


def _on_hosts(attempt: Attempt, problem: Problem) -> Iterator[str]:
    """What would do if hosts had room for it: as little as can be."""
    options = problem.options
    pools = tuple(replace(pool, host_gib=inf) for pool in problem.cluster.pools)
    roomy = problem.on(ClusterView(pools))
    state, tried = {"tiers": ("host",)}, dict[str, dict[str, Any]]()
    if "host" in options.tiers:
        tried["optimizer state"] = state
        if "host" in options.param_tiers:
            tried["optimizer state and parameters"] = state | {"param_tiers": ("host",)}
    if "host" in options.expert_tiers:
        tried["experts"] = {"expert_tiers": ("host",)}
    for words, asked in tried.items():
        if attempt(leanest(roomy, **asked)) is not None:
            room = _least_room(attempt, leanest(problem, **asked))
            yield f"room for {words} in the memory of its nodes (host_gib{room})"
            return


def _least_room(attempt: Attempt, lean: Problem) -> str:
    """How much of each node's memory is enough, in proportion to what its chips have."""

    def on_hosts(times: float) -> list[ChipPool]:
        return [
            replace(
                pool, host_gib=ceil(times * pool.chips_per_node * pool.chip.memory_gib / _PARTS)
            )
            for pool in lean.cluster.pools
        ]

    times = _smallest(lambda more: attempt(lean.on(ClusterView(tuple(on_hosts(more))))) is not None)
    if times is None:
        return ""
    each = {pool.chip.name: f"{pool.host_gib:,.0f}" for pool in on_hosts(times)}
    names = [f"{gib} with {name}" for name, gib in each.items()]
    return f": {', '.join(names) if len(names) > 1 else next(iter(each.values()))}"


def _smallest(fits: Callable[[float], bool], most: float = _MOST) -> float | None:
    """The smallest factor above 1 that fits, to a hundredth; None where none does."""
    low, high = 1.0, 2.0
    while not fits(high):
        low, high = high, 2 * high
        if high > most:
            return None
    while high / low > _FINE:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _with_more_nodes(pool: ChipPool, times: float) -> ChipPool:
    return replace(pool, num_nodes=max(pool.num_nodes, round(pool.num_nodes * times)), node="")


def _fullest(candidate: Candidate) -> tuple[int, Chip, float]:
    """The stage with the least room left, its chip, and the GiB it needs."""
    ranks = [(s, stage.mesh.ranks[0]) for _, s, stage in candidate.plan.stages()]

    def part(rank: int) -> float:
        chip = candidate.cluster.pool_of(rank).chip
        return candidate.memory[rank].total / chip.memory_gib

    stage, rank = max(ranks, key=lambda found: part(found[1]))
    return stage, candidate.cluster.pool_of(rank).chip, candidate.memory[rank].total / 2**30

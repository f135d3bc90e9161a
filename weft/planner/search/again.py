"""Recompute only what memory asks: what plans make again in backward, chosen by stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from math import inf

from weft.cluster.cluster import HOST
from weft.plan.plan import Plan, Recompute, StagePlan
from weft.planner.fit import short_hosts
from weft.planner.problem import Problem
from weft.planner.search.domains import have_room
from weft.planner.search.found import Candidate
from weft.recompute.asked import reduced
from weft.recompute.registry import MODES
from weft.schedules.registry import SCHEDULES

MODES_APART: tuple[Recompute, ...] = ("activation", "feed_forward", "attention+feed_forward")
"""What is searched beside nothing and whole layers, where some plan does not fit."""
ALL, OFFLOAD = "full", "offload"
"""The mode that keeps least, and the one by which hosts keep what others leave."""
_WORTH = 1.01
"""How many times as long others take before hosts keep something."""
Where = tuple[int, int]
"""A pipeline and a position of it."""
Layers = Mapping[Where, int]
"""By position, how many first layers of each of its stages are made again as a whole."""
Fits = Callable[[Plan], Mapping[Where, bool]]
"""Of a plan's positions: does what they keep fit?"""
Seconds = Callable[[Plan], Mapping[Where, float]]
"""Likewise: how long do they compute on a microbatch?"""


def with_least_recompute(candidates: Sequence[Candidate], problem: Problem) -> list[Candidate]:
    """The candidates; those that recompute do so with the modes and in the layers that take least
    time among those for which their chips have room."""
    if not problem.options.mixed_recompute:
        return list(candidates)
    return [_lighter(candidate, problem.on(candidate.cluster)) for candidate in candidates]


def _lighter(candidate: Candidate, problem: Problem) -> Candidate:
    plan = candidate.plan
    places = [
        where
        for where, stages in _positions(plan)
        if all(stage.recompute != "off" for stage in stages)
    ]
    if not places:
        return candidate
    both = partial(_fits, problem=problem), partial(_seconds, problem=problem)
    mixed = lightest(plan, places, *both, hosts=_may_offload(plan, problem))
    time, memory = problem.time(mixed), problem.memory(mixed)
    if time.step_s >= candidate.time.step_s or not have_room(mixed, problem, memory):
        return candidate
    return replace(candidate, plan=mixed, time=time, memory=memory)


def _may_offload(plan: Plan, problem: Problem) -> bool:
    """Hosts may keep what layers do: where samples are so long that attention is not to be made
    again, their chips have hosts, and weight gradients do not wait, which would need it again."""
    waits = any(SCHEDULES[each.schedule].splits_backward for each in plan.pipelines)
    pools = problem.cluster.pools
    hosts = all(pool.host_gib and pool.chip.device != HOST for pool in pools)
    return problem.divides_tokens and hosts and not waits


def lightest(
    plan: Plan, places: Sequence[Where], fits: Fits, seconds: Seconds, *, hosts: bool = False
) -> Plan:
    """The plan with the modes and the layers that take least time and fit, at each of these
    positions; whole layers where nothing fits. ``hosts``: these may keep what is not made again.

    What a position keeps changes no other's memory: each takes what is fastest for itself.
    """
    fastest: dict[Where, tuple[float, str, int]] = dict.fromkeys(places, (inf, "", 0))
    waiting = [f"{base}+{OFFLOAD}".removeprefix("+") for base in _bases()] if hosts else []
    none = dict.fromkeys(places, 0)
    least = {base: seconds(_mixed(plan, dict.fromkeys(places, base), none)) for base in _bases()}
    for base in (*sorted(least, key=lambda base: sum(least[base].values())), *waiting):
        if base in least and all(least[base][where] > fastest[where][0] for where in places):
            continue  # with layers made again as a whole it takes longer still
        layers = _fewest(plan, places, base, fits)
        taken = seconds(_mixed(plan, dict.fromkeys(places, base), layers))
        worth = _WORTH if base in waiting else 1.0
        for where, count in layers.items():
            fastest[where] = min(fastest[where], (worth * taken[where], base, count))
    chosen = {where: base for where, (_, base, _) in fastest.items()}
    return _mixed(plan, chosen, {where: count for where, (_, _, count) in fastest.items()})


def _bases() -> tuple[Recompute, ...]:
    """What layers may recompute that are not made again as a whole: nothing, or modes of which
    none covers another. Those that go by chunks lower no more of what is kept than others."""
    modes = (mode for mode in MODES.values() if mode.is_on and not mode.chunk_tokens)
    parts = [mode.name for mode in modes if mode.name != ALL]
    sets = (found for size in range(len(parts) + 1) for found in combinations(parts, size))
    return tuple("+".join(found) for found in sets if reduced(found) == found)


def _fewest(plan: Plan, places: Sequence[Where], base: Recompute, fits: Fits) -> Layers:
    """By position, the fewest layers made again as a whole with which it fits; the number of its
    longest stage where none does."""
    low = dict.fromkeys(places, 0)
    at = dict(_positions(plan))
    high = {where: max(len(stage.blocks) for stage in at[where]) for where in places}
    while low != high:
        middle = {where: (low[where] + high[where]) // 2 for where in low}
        found = fits(_mixed(plan, dict.fromkeys(low, base), middle))
        for where in low:
            if found[where]:
                high[where] = middle[where]
            else:
                low[where] = min(middle[where] + 1, high[where])
    return high


def _fits(plan: Plan, problem: Problem) -> dict[Where, bool]:
    memory = problem.memory(plan)
    part = problem.options.memory_part * 2**30
    found = {}
    for where, (first, *_) in _positions(plan):
        rank = problem.fullest(first, memory)
        room = part * problem.cluster.pool_of(rank).chip.memory_gib
        found[where] = memory[rank].total <= room
    short = any(short_hosts(plan, problem))
    return dict.fromkeys(found, False) if short else found


def _seconds(plan: Plan, problem: Problem) -> dict[Where, float]:
    times = problem.times(plan)
    return {
        (p, position): sum(times[p][0][number].whole_s for number in numbers)
        for p, pipeline in enumerate(plan.pipelines)
        for position, numbers in enumerate(pipeline.positions())
    }


def _positions(plan: Plan) -> Iterator[tuple[Where, list[StagePlan]]]:
    """All of a plan, and their stages."""
    for p, pipeline in enumerate(plan.pipelines):
        for position, numbers in enumerate(pipeline.positions()):
            yield (p, position), [pipeline.stages[number] for number in numbers]


def _mixed(plan: Plan, bases: Mapping[Where, Recompute], layers: Layers) -> Plan:
    """With a base in the layers of a position, and so many of each stage's made again whole."""
    wanted = {
        stage.mesh.ranks: (bases[where], layers[where])
        for where, stages in _positions(plan)
        for stage in stages
        if where in bases
    }

    def mixed(stage: StagePlan) -> StagePlan:
        if stage.mesh.ranks not in wanted:
            return stage
        base, count = wanted[stage.mesh.ranks]
        return replace(stage, recompute=_text(base, count, len(stage.blocks)))

    return plan.each(mixed)


def _text(base: Recompute, count: int, num_layers: int) -> Recompute:
    if count >= num_layers:
        return ALL
    parts = [base] * bool(base) + [f"{ALL}:{count}"] * bool(count)
    return "+".join(parts) or "off"

"""The cheapest nodes whose best plan reaches so much compute.

Chips compute less in a plan than alone, for they wait, and a mix that computes enough may be too
small to hold the model: then more nodes are taken, in the end all of them.
"""

from __future__ import annotations

from math import sqrt

from weft.config.errors import ConfigError
from weft.planner.need import Mix, choose_mix, in_units
from weft.planner.problem import Problem
from weft.planner.search import Found, Watch, fits, search
from weft.planner.search.found import ENDED_EARLY

ROUNDS = 6
"""Mixes that are searched before all nodes are taken."""
LARGER = 1.1
"""Times the compute of the next mix, at least: it has some node more."""
TINY = 1e-9
"""Relative, of computing and of costs."""


def enough(problem: Problem, need: float, *, watch: Watch | None = None) -> tuple[Mix, Found]:
    """The mix whose best plan reaches ``need`` FLOP/s.

    Raises:
        NoPlan: not even all nodes hold the model.
        ConfigError: no plan that was found reaches it; says the most that one does.
    """
    most = choose_mix(problem, 0.0).most_flops
    mix, low, best = choose_mix(problem, need), 0.0, 0.0
    high: tuple[Mix, Found] | None = None
    for _ in range(ROUNDS):
        while high is None and not _is_all(mix, problem) and not fits(problem.on(mix.cluster)):
            low = mix.flops_s
            mix = choose_mix(problem, min(LARGER * low, most))
        if _is_all(mix, problem):
            break
        found = search(problem.on(mix.cluster), watch=watch)
        reached = problem.workload.flops_s(found.best.time.step_s)
        best = max(best, reached)
        if reached >= need:
            high = mix, found
        else:
            low = mix.flops_s
        if high is None:
            mix = choose_mix(problem, min(max(LARGER, need / reached) * mix.flops_s, most))
        elif cheaper := _between(low, high[0], problem):
            mix = cheaper
        else:
            break
    if high is not None:
        return high
    found = search(problem, watch=watch)
    best = max(best, problem.workload.flops_s(found.best.time.step_s))
    if best < need:
        expected = f"at most {in_units(best)}, the most that a plan for these nodes reaches"
        hint = ENDED_EARLY if found.is_cut_short else "More samples a step let more chips work."
        raise ConfigError("--need", in_units(need), expected, hint)
    return choose_mix(problem, most), found


def _is_all(mix: Mix, problem: Problem) -> bool:
    return mix.cluster.world_size == problem.cluster.world_size


def _between(low: float, high: Mix, problem: Problem) -> Mix | None:
    """One that costs less than what is enough and computes more than what was not, where there was
    any: by how much a mix computes less in a plan than alone is its own."""
    for more in (sqrt(low * high.flops_s), (1 + TINY) * low) if low else ():
        mix = choose_mix(problem, more)
        if mix.cost < (1 - TINY) * high.cost and fits(problem.on(mix.cluster)):
            return mix
    return None

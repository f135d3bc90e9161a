"""The cheapest nodes whose best plan reaches so much compute.

Chips compute less in a plan than alone, for they wait, and a mix that computes enough may be too
small to hold the model: then more nodes are taken, in the end all of them.
"""

from __future__ import annotations

from weft.config.errors import ConfigError
from weft.planner.need import Mix, choose_mix, in_units
from weft.planner.problem import Problem
from weft.planner.search import Found, Watch, fits, search
from weft.planner.search.found import ENDED_EARLY

ROUNDS = 6
"""Mixes that are searched before all nodes are taken."""
LARGER = 1.1
"""Times the compute of the next mix, at least: it has some node more."""


def enough(problem: Problem, need: float, *, watch: Watch | None = None) -> tuple[Mix, Found]:
    """The mix whose best plan reaches ``need`` FLOP/s.

    Raises:
        NoPlan: not even all nodes hold the model.
        ConfigError: no plan that was found reaches it; says the most that one does.
    """
    every = problem.cluster.world_size
    mix, most = choose_mix(problem, need), choose_mix(problem, 0.0).most_flops
    best = 0.0
    for _ in range(ROUNDS):
        while mix.cluster.world_size < every and not fits(problem.on(mix.cluster)):
            mix = choose_mix(problem, min(LARGER * mix.flops_s, most))
        if mix.cluster.world_size == every:
            break
        found = search(problem.on(mix.cluster), watch=watch)
        reached = problem.workload.flops_s(found.best.time.step_s)
        if reached >= need:
            return mix, found
        best = max(best, reached)
        mix = choose_mix(problem, min(max(LARGER, need / reached) * mix.flops_s, most))
    found = search(problem, watch=watch)
    best = max(best, problem.workload.flops_s(found.best.time.step_s))
    if best < need:
        expected = f"at most {in_units(best)}, the most that a plan for these nodes reaches"
        hint = ENDED_EARLY if found.is_cut_short else "More samples a step let more chips work."
        raise ConfigError("--need", in_units(need), expected, hint)
    return choose_mix(problem, most), found

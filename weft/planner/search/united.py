"""Unlike chips as one mesh: samples where speed is, state where memory is.

All ranks of such a mesh hold the same layers. For each microbatch, level of ZeRO and recomputation
the samples are divided so that the slowest rank takes least time and each has room for what it
computes with; then state goes where it is updated fastest, as far as there is room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations, product
from math import floor, inf
from typing import NamedTuple

from weft.cluster.view import ClusterView
from weft.cost.choice import choice_of
from weft.cost.rates import compute_seconds
from weft.models.registry import shape_of
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, Recompute, StagePlan, ZeroLevel
from weft.planner.naming import name_of
from weft.planner.problem import Problem
from weft.planner.search.again import MODES_APART
from weft.planner.search.choice import SAMPLES
from weft.planner.search.domains import have_room
from weft.planner.search.found import Candidate
from weft.planner.search.meshes import divisors, powers

FEW_CHIPS = 16
"""Of a mesh, up to which it is looked at."""
PARTS = 1000
"""Into which state is divided."""


def united(
    problem: Problem, least_s: Callable[[ClusterView], float] | None = None, below: float = inf
) -> Candidate | None:
    """The fastest plan of one mesh of unlike chips that fits; None where there is none.

    Args:
        least_s: What such a mesh takes at least.
        below: Seconds of another plan, than which none that is slower is looked for.
    """
    best: Candidate | None = None
    for part in unlike_groups(problem, min(FEW_CHIPS, problem.workload.samples)):
        if least_s is None or least_s(part) < below:
            found = _best(problem.on(part))
            if found and (best is None or found.time.step_s < best.time.step_s):
                best, below = found, min(below, found.time.step_s)
    return best


def with_united(
    candidates: Sequence[Candidate], problem: Problem, least_s: Callable[[ClusterView], float]
) -> list[Candidate]:
    """The candidates, fastest first, behind such a plan where it is faster than all of them."""
    one = united(problem, least_s, candidates[0].time.step_s)
    if one is None or one.time.step_s >= candidates[0].time.step_s:
        return list(candidates)
    return [one, *candidates]


def unlike_groups(problem: Problem, most: int) -> Iterator[ClusterView]:
    """Pools of several kinds that are one device to PyTorch, at one site; ``most``: chips."""
    pools, options = problem.cluster.pools, problem.options
    elsewhere = {options.tiers[0], options.param_tiers[0], options.expert_tiers[0]} - {"device"}
    if elsewhere or not (options.any_shape and options.unlike_stages):
        return
    for number in range(2 if options.leave_idle else len(pools), len(pools) + 1):
        for some in combinations(pools, number):
            view = ClusterView(some)
            near = len({(pool.site, pool.chip.device) for pool in some}) == 1
            unlike = len({pool.chip.name for pool in some}) > 1 if near else False
            if unlike and view.world_size <= most:
                yield view


class _Asked(NamedTuple):
    """What is divided for."""

    zero: ZeroLevel
    recompute: Recompute


def _best(problem: Problem) -> Candidate | None:
    """The fastest on all of a problem's chips."""
    work, options, mesh = problem.workload, problem.options, _United(problem)
    every = product(
        [level for level in options.zero if level],
        options.recompute + MODES_APART * options.mixed_recompute,
        sorted({*divisors(work.samples), *powers(work.samples)}),
    )
    best: Candidate | None = None
    for zero, recompute, micro in every:
        plan = mesh.divided(_Asked(zero, recompute), micro)
        if plan is None:
            continue
        time = problem.time(plan)
        if best is not None and time.step_s >= best.time.step_s:
            continue
        memory = problem.memory(plan)
        if have_room(plan, problem, memory):
            name = name_of(plan, problem.cluster)
            best = Candidate(
                name=name, plan=plan, cluster=problem.cluster, time=time, memory=memory
            )
    return best


class _United:
    """All chips of a problem as one mesh."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._size = problem, problem.cluster.world_size
        self._room = cache(self._room_of)
        self._seconds = cache(self._seconds_of)
        pools = [problem.cluster.pool_of(rank) for rank in range(self._size)]
        part = problem.options.memory_part * 2**30
        self._budgets = [part * pool.chip.memory_gib for pool in pools]
        self._costs = [problem.knowledge.hardware_of(pool).chip for pool in pools]

    def divided(self, asked: _Asked, micro: int) -> Plan | None:
        """Samples of a microbatch and state as they are best divided; None: there is no room."""
        samples = self._samples(asked, micro)
        allowed = self._problem.options.micros
        if not samples or (allowed is not None and max(samples) not in allowed):
            return None
        bare = [self._room(asked, number) for number in samples]
        free = [budget - used for budget, (used, _) in zip(self._budgets, bare, strict=True)]
        state = max(whole for _, whole in bare)
        rates = [1 / cost.moving_seconds(1.0) for cost in self._costs]
        safe = 1 - (self._size + 1) / PARTS  # what is rounded off goes to some rank
        parts = filled(rates, [safe * room / state for room in free])
        if parts is None:
            return None
        return self._plan(asked, samples, [floor(PARTS * part) for part in parts])

    def _samples(self, asked: _Asked, micro: int) -> list[int]:
        """One by one to the rank that has them done first; empty where there is no room."""
        each = self._seconds(asked.recompute)
        samples = [0] * self._size
        for _ in range(micro):
            after = sorted((each[r] * (samples[r] + 1), r) for r in range(self._size))
            with_room = (r for _, r in after if self._has_room(asked, r, samples[r] + 1))
            rank = next(with_room, None)
            if rank is None:
                return []
            samples[rank] += 1
        return samples

    def _has_room(self, asked: _Asked, rank: int, samples: int) -> bool:
        return self._room(asked, samples)[0] <= self._budgets[rank]

    def _room_of(self, asked: _Asked, samples: int) -> tuple[float, float]:
        """Bytes of a rank with so many samples and none of the state; and of all that, where it has
        some samples, as somebody has."""
        state = [0] * (self._size - 1) + [1]
        counts = [samples] * (self._size - 1) + [max(samples, 1)]
        memory = self._problem.memory(self._plan(asked, counts, state))
        none, whole = memory[0].total, memory[self._size - 1].total
        return none, (whole - none) * bool(samples)

    def _seconds_of(self, recompute: Recompute) -> list[float]:
        """Of a sample, by rank."""
        seq_len = self._problem.workload.seq_len
        plan = self._plan(_Asked(1, recompute), [1] * self._size, [1] * self._size)
        work = choice_of(plan.pipelines[0], 0, seq_len, rank=0).work
        shape = shape_of(self._problem.workload.spec)
        return [compute_seconds(shape, work, cost).whole_s for cost in self._costs]

    def _plan(self, asked: _Asked, samples: Sequence[int], state: Sequence[int]) -> Plan:
        work, size = self._problem.workload, self._size
        stage = StagePlan(
            mesh=Mesh.of(range(size), **{SAMPLES: size}),
            layers=(0, work.spec.num_layers),
            device=self._problem.cluster.pools[0].chip.device,
            precision=work.precision,
            recompute=asked.recompute,
            zero=asked.zero,
            sample_shares=tuple(samples),
            state_shares=tuple(state),
        )
        micro = max(sum(samples), 1)
        line = PipelinePlan(stages=(stage,), samples=max(work.samples, micro), microbatch=micro)
        return Plan(num_layers=work.spec.num_layers, pipelines=(line,))


def filled(rates: Sequence[float], room: Sequence[float]) -> list[float] | None:
    """Parts of one in proportion to rates, as far as each has room; None: there is too little."""
    parts, left = [0.0] * len(rates), 1.0
    free = {number for number, most in enumerate(room) if most > 0}
    while free:
        whole = sum(rates[number] for number in free)
        full = {number for number in free if left * rates[number] / whole > room[number]}
        if not full:
            for number in free:
                parts[number] = left * rates[number] / whole
            return parts
        for number in full:
            parts[number] = room[number]
            left -= room[number]
        free -= full
    return None

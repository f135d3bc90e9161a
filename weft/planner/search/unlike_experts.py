"""Unlike chips as one mesh that divides experts: a fast chip has more of them, and more samples.

All ranks hold the same but experts, whose shares go by what each computes. Samples and experts are
moved one by one from chip to chip as long as a step gets shorter, or less memory is short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from typing import NamedTuple

from weft.cluster.view import ClusterView
from weft.cost.choice import choice_of
from weft.cost.memory import Memory
from weft.cost.rates import compute_seconds
from weft.models.registry import shape_of
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, Recompute, StagePlan, ZeroLevel
from weft.plan.tiling import split_by_weight
from weft.planner.experts import BY_EXPERTS
from weft.planner.naming import name_of
from weft.planner.problem import Problem
from weft.planner.search.domains import have_room, lacking
from weft.planner.search.found import Candidate
from weft.planner.search.united import unlike_groups

FEW_CHIPS = 4
"""Up to which this is looked at: moves grow with their square."""


class _Asked(NamedTuple):
    """What is divided for."""

    micro: int
    zero: ZeroLevel
    recompute: Recompute


class _Parts(NamedTuple):
    """By rank."""

    samples: tuple[int, ...]
    experts: tuple[int, ...]

    def moved(self) -> Iterator[_Parts]:
        """Those of which one sample or expert is another rank's; each has one of both."""
        for field, parts in self._asdict().items():
            for giver, taker in permutations(range(len(parts)), 2):
                if parts[giver] > 1:
                    more = {giver: -1, taker: 1}
                    after = tuple(n + more.get(rank, 0) for rank, n in enumerate(parts))
                    yield self._replace(**{field: after})


def with_unlike_experts(candidates: Sequence[Candidate], problem: Problem) -> list[Candidate]:
    """The candidates, fastest first, behind such a plan where it is faster than all of them."""
    one = unlike_experts(problem)
    if one is None or one.time.step_s >= candidates[0].time.step_s:
        return list(candidates)
    return [one, *candidates]


def unlike_experts(problem: Problem) -> Candidate | None:
    """The fastest plan in which unlike chips divide experts, if any fits."""
    found = (_best(problem.on(view)) for view in _views(problem))
    return min(filter(None, found), key=lambda each: each.time.step_s, default=None)


def _views(problem: Problem) -> Iterator[ClusterView]:
    shape = shape_of(problem.workload.spec).experts
    if shape is not None and problem.options.unlike_meshes:
        most = min(FEW_CHIPS, shape.num_experts, problem.workload.samples)
        yield from unlike_groups(problem, most)


def _best(problem: Problem) -> Candidate | None:
    """The fastest on all of a problem's chips."""
    options, samples = problem.options, problem.workload.samples
    size = problem.cluster.world_size
    micros = [n for n in range(size, samples + 1) if samples % n == 0]
    every = product(micros, [level for level in options.zero if level < 3], options.recompute)
    found = (_climbed(_Asked(*each), problem) for each in every)
    return min(filter(None, found), key=lambda each: each.time.step_s, default=None)


def _climbed(asked: _Asked, problem: Problem) -> Candidate | None:
    """The best that moves lead to from parts by speed; None where memory is short of it."""
    parts = _by_speed(asked, problem)
    now = _weighed(asked, parts, problem)
    while True:
        after, better = min(
            ((_weighed(asked, other, problem), other) for other in parts.moved()),
            key=lambda both: both[0].order,
        )
        if after.order >= now.order:
            break
        now, parts = after, better
    limit = problem.options.micros
    if now.short or (limit is not None and max(parts.samples) not in limit):
        return None
    cluster, time = problem.cluster, problem.time(now.plan)
    name = name_of(now.plan, cluster)
    return Candidate(name=name, plan=now.plan, cluster=cluster, time=time, memory=now.memory)


class _Weighed(NamedTuple):
    """A plan, and how good it is."""

    plan: Plan
    memory: dict[int, Memory]
    short: float
    """Bytes that the fullest rank lacks."""
    step_s: float

    @property
    def order(self) -> tuple[float, float]:
        return self.short, self.step_s


def _weighed(asked: _Asked, parts: _Parts, problem: Problem) -> _Weighed:
    plan = _plan(asked, parts, problem)
    memory = problem.memory(plan)
    short = lacking(memory, problem)
    if not short and not have_room(plan, problem, memory):
        short = 1.0
    return _Weighed(plan, memory, short, problem.time(plan).step_s)


def _by_speed(asked: _Asked, problem: Problem) -> _Parts:
    """Each rank has one of both at least."""
    shape, size = shape_of(problem.workload.spec), problem.cluster.world_size
    assert shape.experts is not None, "it has experts"
    even = _Parts((1,) * size, (1,) * size)
    line = _plan(asked, even, problem).pipelines[0]
    work = choice_of(line, 0, problem.workload.seq_len, rank=0).work
    hardware = (
        problem.knowledge.hardware_of(problem.cluster.pool_of(rank)) for rank in range(size)
    )
    seconds = [compute_seconds(shape, work, each.chip).whole_s for each in hardware]
    rates = [round(1e3 * min(seconds) / each) or 1 for each in seconds]

    def parts(many: int) -> tuple[int, ...]:
        return tuple(1 + more for more in split_by_weight(many - size, rates))

    return _Parts(parts(asked.micro), parts(shape.experts.num_experts))


def _plan(asked: _Asked, parts: _Parts, problem: Problem) -> Plan:
    work, size = problem.workload, problem.cluster.world_size
    mesh = Mesh.of(range(size), **{BY_EXPERTS: size})
    stage = StagePlan(
        mesh=mesh.with_shares(**{BY_EXPERTS: parts.experts}),
        layers=(0, work.spec.num_layers),
        device=problem.cluster.pools[0].chip.device,
        precision=work.precision,
        recompute=asked.recompute,
        zero=asked.zero,
        sample_shares=parts.samples,
    )
    line = PipelinePlan(stages=(stage,), samples=work.samples, microbatch=asked.micro)
    return Plan(num_layers=work.spec.num_layers, pipelines=(line,))

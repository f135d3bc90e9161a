"""Unlike chips of a machine as meshes that divide widths: a fast chip has more of every layer.

A mesh has as many chips of each kind as any other, all of one machine, and each chip what it is
fast enough for, in whole key heads with all that goes with them. Meshes compute other samples, or
other layers, as many each. Parts are moved from kind to kind as long as a step gets shorter, or
less memory is short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise, permutations, product
from math import gcd, inf
from typing import NamedTuple

from weft.axes.registry import AXES
from weft.cost.choice import choice_of
from weft.cost.rates import compute_seconds
from weft.cost.work import EVEN
from weft.models.registry import dims_of_model, shape_of
from weft.plan.mesh import WIDTH_AXIS, Mesh
from weft.plan.plan import PipelinePlan, Plan, Recompute, StagePlan, ZeroLevel
from weft.plan.tiling import split_by_weight, split_evenly
from weft.planner.casts import with_casts
from weft.planner.naming import name_of
from weft.planner.problem import Problem
from weft.planner.search.again import MODES_APART
from weft.planner.search.choice import SAMPLES
from weft.planner.search.domains import have_room, lacking
from weft.planner.search.found import Candidate
from weft.planner.search.meshes import divisors, sizes
from weft.planner.search.united import unlike_groups
from weft.planner.whole_blocks import cut_block
from weft.schedules.registry import SCHEDULES

FEW_CHIPS = 8
"""Up to which this is looked at."""
NEARLY = 1.2
"""Moves make a step no shorter by more than this: parts go by speed to begin with."""

Totals = tuple[int, ...]
"""By kind of chip: parts of a mesh's widths that its chips have together."""


def with_unlike_widths(candidates: Sequence[Candidate], problem: Problem) -> list[Candidate]:
    """The candidates, fastest first, behind such a plan where it is faster than all of them."""
    one = unlike_widths(problem, candidates[0].time.step_s)
    return list(candidates) if one is None else [one, *candidates]


def unlike_widths(problem: Problem, below: float = inf) -> Candidate | None:
    """The fastest plan of such meshes that fits; None where none takes less than that, or fits."""
    best: Candidate | None = None
    for view in unlike_groups(problem, FEW_CHIPS) if problem.options.unlike_meshes else ():
        few = _FewKinds(problem.on(view))
        for asked in few.every():
            found = few.best(asked, below)
            if found is not None:
                best, below = found, found.time.step_s
    return best


class _Asked(NamedTuple):
    """What widths are divided for."""

    meshes: tuple[tuple[tuple[int, ...], ...], ...]
    """Ranks of each by kind; those of one pipeline's stage are neighbours."""
    stages: int
    recompute: Recompute
    micro: int
    zero: ZeroLevel


class _Weighed(NamedTuple):
    """A plan, and how good it is."""

    short: float
    """Bytes that the fullest rank lacks."""
    step_s: float
    totals: Totals
    plan: Plan


class _FewKinds:
    """All chips of a problem, of which each machine has the same kinds."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        divided = (
            dim.num_groups
            for dim in dims_of_model(problem.workload.spec)
            if dim.width and AXES[WIDTH_AXIS].divides(dim, "param")
        )
        self._parts = min(divided, default=1)

    def every(self) -> Iterator[_Asked]:
        """Whatever there is to choose but totals."""
        work, options = self._problem.workload, self._problem.options
        modes = options.recompute + MODES_APART * options.mixed_recompute
        most = min(options.max_stages or work.spec.num_layers, work.spec.num_layers)
        for meshes in self._meshes():
            many, ways = len(meshes), sum(map(len, meshes[0]))
            if ways > min(self._parts, options.max_split or ways):
                continue
            for stages in (n for n in range(1, min(many, most) + 1) if many % n == 0):
                copies = many // stages
                micros = [copies * n for n in options.micros or sizes(work.samples, copies)]
                levels = options.zero if copies > 1 else options.zero[:1]
                for rest in product(modes, micros, levels):
                    yield _Asked(meshes, stages, *rest)

    def best(self, asked: _Asked, below: float) -> Candidate | None:
        """The best that moves lead to from parts by speed, if it fits and takes less than that."""
        now = self._weighed(asked, self._by_speed(asked))
        if now is None or now.step_s > NEARLY * below:
            return None
        while True:
            moved = (self._weighed(asked, totals) for totals in self._moved(asked, now.totals))
            after = min(filter(None, moved), key=lambda each: each[:2], default=now)
            if after[:2] >= now[:2]:
                break
            now = after
        memory, cluster = self._problem.memory(now.plan), self._problem.cluster
        if now.step_s >= below or not have_room(now.plan, self._problem, memory):
            return None
        time, name = self._problem.time(now.plan), name_of(now.plan, cluster)
        return Candidate(name=name, plan=now.plan, cluster=cluster, time=time, memory=memory)

    def _meshes(self) -> Iterator[tuple[tuple[tuple[int, ...], ...], ...]]:
        """Every way to make meshes of all chips, of which each has the same kinds."""
        view = self._problem.cluster
        nodes: dict[int, dict[str, list[int]]] = {}
        for rank in range(view.world_size):
            kinds = nodes.setdefault(view.node_of(rank), {})
            kinds.setdefault(view.pool_of(rank).chip.name, []).append(rank)
        counts, *others = ({kind: len(n) for kind, n in each.items()} for each in nodes.values())
        if len(counts) == 1 or any(other != counts for other in others):
            return
        most = gcd(*counts.values())
        for apart in divisors(most):
            yield tuple(
                tuple(tuple(ranks[n::apart]) for _, ranks in sorted(kinds.items()))
                for kinds in nodes.values()
                for n in range(apart)
            )

    def _moved(self, asked: _Asked, totals: Totals) -> Iterator[Totals]:
        """Those of which some parts are another kind's; each chip has one at least."""
        counts = [len(ranks) for ranks in asked.meshes[0]]
        for giver, taker in permutations(range(len(totals)), 2):
            for many in range(1, min(max(counts), totals[giver] - counts[giver]) + 1):
                more = {giver: -many, taker: many}
                yield tuple(n + more.get(kind, 0) for kind, n in enumerate(totals))

    def _by_speed(self, asked: _Asked) -> Totals:
        kinds, problem = asked.meshes[0], self._problem
        counts = [len(ranks) for ranks in kinds]
        line = self._plan(asked, tuple(counts)).pipelines[0]
        work = choice_of(line, 0, problem.workload.seq_len).work._replace(widths=EVEN)
        shape = shape_of(problem.workload.spec)
        costs = (
            problem.knowledge.hardware_of(problem.cluster.pool_of(ranks[0])) for ranks in kinds
        )
        seconds = [compute_seconds(shape, work, each.chip).whole_s for each in costs]
        rates = [
            round(1e3 * n * min(seconds) / each) for n, each in zip(counts, seconds, strict=True)
        ]
        more = split_by_weight(self._parts - sum(counts), rates)
        return tuple(n + m for n, m in zip(counts, more, strict=True))

    def _weighed(self, asked: _Asked, totals: Totals) -> _Weighed | None:
        """None where a block of a weight would be cut."""
        problem, plan = self._problem, self._plan(asked, totals)
        work, mesh = problem.workload, plan.pipelines[0].stages[0].mesh
        if cut_block(work.spec, mesh.axes, work.precision, unlike=mesh.unlike):
            return None
        short = lacking(problem.memory(plan), problem)
        return _Weighed(short, problem.time(plan).step_s, totals, plan)

    def _plan(self, asked: _Asked, totals: Totals) -> Plan:
        problem, copies = self._problem, len(asked.meshes) // asked.stages
        work, options = problem.workload, problem.options
        each = zip(asked.meshes[0], totals, strict=True)
        shares = [*chain(*(split_evenly(total, len(ranks)) for ranks, total in each))]
        ends = [0, *accumulate(split_evenly(work.spec.num_layers, asked.stages))]
        stages = []
        for number, layers in enumerate(pairwise(ends)):
            mine = asked.meshes[number * copies : (number + 1) * copies]
            ranks = tuple(chain(*chain(*mine)))
            axes = {SAMPLES: copies, WIDTH_AXIS: len(shares)}
            mesh = Mesh.of(ranks, **{name: size for name, size in axes.items() if size > 1})
            stages.append(
                StagePlan(
                    mesh=mesh.with_shares(**{WIDTH_AXIS: shares}),
                    layers=layers,
                    device=problem.cluster.pools[0].chip.device,
                    precision=work.precision,
                    recompute=asked.recompute,
                    zero=asked.zero,
                )
            )
        schedule = next((n for n in options.schedules if SCHEDULES[n].chunks == 1), "1f1b")
        line = PipelinePlan(
            stages=tuple(stages), samples=work.samples, microbatch=asked.micro, schedule=schedule
        )
        plan = Plan(num_layers=work.spec.num_layers, pipelines=(line,))
        if not options.border:
            return plan
        return with_casts(plan, options.border, options.border_between, problem.cluster.node_of)

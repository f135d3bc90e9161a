"""What a bench asks of the planner: plans for each part of a mixed cluster, and for all of it.

Generations are the ways in which mixed training has been done: data parallel with shares by speed
(1), one pipeline whose layers follow speed (2), a pipeline with a mesh for each kind of chip (3),
and unlike pipelines side by side, here each part as it is alone (``pooled``). Each is the same
search, told which shapes it may look at.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from math import ceil
from typing import Literal

from weft.mix.chips import Chips
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.naming import name_of
from weft.planner.problem import Options, Problem, Shape, Workload
from weft.planner.renumber import renumbered
from weft.planner.search import Candidate, NoPlan, search

Generation = Literal["alone", "pooled", "1", "2", "3"]
POOLED = "unlike pipelines: each part as it is alone"
NAMES: Mapping[Generation, str] = {
    "pooled": POOLED,
    "1": "1: data parallel by speed",
    "2": "2: pipeline by speed",
    "3": "3: a mesh for each kind",
}


@dataclass(frozen=True, slots=True)
class Question:
    """One question to the planner: what may the plan look like?"""

    generation: Generation
    micro: int
    """Samples of a microbatch that a rank has."""
    shapes: Mapping[str, tuple[Shape, ...]] = field(default_factory=dict)
    """By chip: how the parts alone are laid out; what is pooled keeps that."""

    def options(self, num_pools: int) -> Options:
        """What the search may look at."""
        usual = Options(micros=(self.micro,), leave_idle=False)
        match self.generation:
            case "alone":
                return usual
            case "pooled":
                most = max(shape.micro for given in self.shapes.values() for shape in given)
                micros = tuple(range(1, most + 1))
                return replace(usual, micros=micros, unlike_stages=False, shapes=self.shapes)
            case "1":
                return replace(usual, max_stages=1, max_split=1)
            case "2":
                return replace(usual, max_pipelines=1, max_ranks=1)
            case "3":
                return replace(usual, max_pipelines=1, max_stages=num_pools)


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan that is measured."""

    name: str
    plan: Plan
    """On the ranks of the cluster."""
    question: Question
    shapes: Mapping[str, tuple[Shape, ...]] = field(default_factory=dict)
    """Of the plan, by chip."""

    @property
    def generation(self) -> Generation:
        return self.question.generation


def ask(question: Question, work: Workload, chips: Chips) -> Trial:
    """The planner's plan for all of these chips.

    Microbatches are smaller than asked for where there is no plan with those, or where a share
    that is a single one could be less.

    Raises:
        NoPlan: nothing fits, or no plan looks like that.
    """
    options = question.options(len(chips.pools.pools))
    try:
        best = _best(work, chips, options)
    except NoPlan:
        best = _best(work, chips, _with_smaller(options))
    if any(pipeline.samples <= pipeline.microbatch for pipeline in best.plan.pipelines):
        other = _best(work, chips, _with_smaller(options))
        best = min(best, other, key=lambda candidate: candidate.time.step_s)
    plan = renumbered(best.plan, best.cluster, chips.by_rank)
    return Trial(
        name=_name(question, best, plan),
        plan=plan,
        question=question,
        shapes=_shapes(best),
    )


def recomputes(plan: Plan) -> bool:
    """Some stage does its forward twice, to save memory."""
    return any(stage.recompute != "off" for _, _, stage in plan.stages())


def micro_of(stages: Iterable[tuple[PipelinePlan, StagePlan]]) -> str:
    """Samples of a micro-batch that ranks of such stages have, in words: what a plan has, whatever
    was asked for."""
    sizes = {ceil(pipeline.microbatch / stage.mesh.sample_ways) for pipeline, stage in stages}
    return " and ".join(map(str, sorted(sizes)))


def _best(work: Workload, chips: Chips, options: Options) -> Candidate:
    return search(Problem(work, chips.pools, chips.knowledge, options)).best


def _with_smaller(options: Options) -> Options:
    """All sizes of microbatches up to those that were asked for."""
    micros = options.micros and tuple(range(1, max(options.micros) + 1))
    shapes = {
        name: tuple(replace(shape, micro=m) for shape in given for m in range(1, shape.micro + 1))
        for name, given in options.shapes.items()
    }
    return replace(options, micros=micros, shapes=shapes)


def _name(question: Question, best: Candidate, plan: Plan) -> str:
    """What a bench calls the plan."""
    if question.generation == "pooled":
        return POOLED
    again = {r for _, _, s in plan.stages() if s.recompute != "off" for r in s.mesh.ranks}
    name = NAMES.get(question.generation) or name_of(best.plan, best.cluster)
    words = f"{name}, micro {micro_of((plan.pipelines[p], s) for p, _, s in plan.stages())}"
    if not again:
        return words
    ranks = ", ".join(map(str, sorted(again)))
    where = f" on rank {ranks}" if len(again) < plan.world_size else ""
    return f"{words}, recompute{where}"


def _shapes(best: Candidate) -> dict[str, tuple[Shape, ...]]:
    """How the pools of a plan are laid out."""
    found: dict[str, list[Shape]] = {}
    ends = list(accumulate(pool.num_chips for pool in best.cluster.pools))
    for pipeline in best.plan.pipelines:
        meshes = [pipeline.stages[stages[0]] for stages in pipeline.positions()]
        pools = [bisect_right(ends, stage.mesh.ranks[0]) for stage in meshes]
        for number, same in groupby(zip(pools, meshes, strict=True), key=lambda pair: pair[0]):
            stages = [stage for _, stage in same]
            shape = Shape(
                axes=dict(stages[0].mesh.axes),
                meshes=len(stages),
                micro=pipeline.microbatch,
                recompute=stages[0].recompute,
            )
            found.setdefault(best.cluster.pools[number].chip.name, []).append(shape)
    return {name: tuple(shapes) for name, shapes in found.items()}

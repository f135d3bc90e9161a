"""A plan that may be tried: what is predicted of it, and on what its time and memory hang.

Both are taken apart twice. ``work`` and ``Holding.num_bytes`` say how much of each thing a plan
does and holds, for rules that take no model of time or memory for true (``weft.tune.rules``).
``leans`` says how much longer a step would be if one thing took longer, for what a trial teaches
about others (``weft.tune.belief``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, log
from typing import Any

from weft.cluster.view import ClusterView
from weft.config.axes import UNLIKE
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.forecast import Forecast, forecast
from weft.planner.naming import name_of
from weft.planner.problem import Problem
from weft.recompute.asked import offloads
from weft.resolve.paced import Paced
from weft.schedules.registry import SCHEDULES
from weft.simulate.step import StepTime

LONGER = 1.1
"""Times as long as one thing takes, to see how much longer a step then is."""
CALL_S = 1e-3
"""Of a micro-batch on a stage beside what it computes, to see what part of a step calls may be."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What each rank of one position holds at a step's peak, as predicted."""

    kind: str
    """Of chip."""
    ranks: tuple[int, ...]
    recompute: str
    num_bytes: Mapping[str, float]
    """By category."""
    limit_bytes: float
    """Of the chip."""

    @property
    def total(self) -> float:
        return sum(self.num_bytes.values())

    @property
    def feature(self) -> str:
        """For what a correction of predicted memory counts: chips of a kind that recompute so."""
        how = "nothing is recomputed" if self.recompute == "off" else f"recompute {self.recompute}"
        return f"{self.kind}, {how}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan on the ranks that trials have."""

    name: str
    plan: Plan
    predicted_s: float
    """Of a step."""
    work: Mapping[str, float]
    """Amounts: whatever each costs, a plan with no less of any takes no less time."""
    leans: Mapping[str, float]
    """By thing: the part of a step that goes with it; or 1 for what a plan has."""
    memory: tuple[Holding, ...]
    is_given: bool = False
    """The user's own."""

    def as_json(self) -> dict[str, Any]:
        """Numbers and text alone, which ``from_json`` reads back equal."""
        return {
            "name": self.name,
            "predicted_s": self.predicted_s,
            "work": dict(self.work),
            "leans": dict(self.leans),
            "memory": [asdict(holding) for holding in self.memory],
            "is_given": self.is_given,
            "plan": json.loads(self.plan.to_json()),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Candidate:
        """What ``as_json`` wrote."""
        memory = ({**each, "ranks": tuple(each["ranks"])} for each in data["memory"])
        return Candidate(
            name=data["name"],
            plan=Plan.from_json(json.dumps(data["plan"])),
            predicted_s=data["predicted_s"],
            work=data["work"],
            leans=data["leans"],
            memory=tuple(Holding(**each) for each in memory),
            is_given=data["is_given"],
        )


def candidate_of(
    plan: Plan, problem: Problem, *, time: StepTime | None = None, is_given: bool = False
) -> Candidate:
    """What is predicted of a plan whose ranks count through the problem's cluster."""
    cast = forecast(plan, problem, time=time)
    return Candidate(
        name=_name(plan, problem.cluster),
        plan=plan,
        predicted_s=cast.step_s,
        work=dict(_work(cast)),
        leans=dict(_leans(cast)),
        memory=tuple(_memory(cast)),
        is_given=is_given,
    )


def likeness(candidate: Candidate) -> object:
    """Equal for plans of which one is a near copy of the other: only layers and samples differ."""
    plan = candidate.plan
    return (
        plan.domains != (),
        tuple(
            (
                _order(pipeline),
                pipeline.microbatch,
                tuple((s.mesh, s.recompute, s.zero, s.border, s.pieces) for s in pipeline.stages),
                any(map(any, (stage.cut for stage in pipeline.stages))),
                any(stage.head_rows for stage in pipeline.stages),
            )
            for pipeline in plan.pipelines
        ),
    )


def _order(pipeline: PipelinePlan) -> str:
    return "" if len(pipeline.stages) == 1 else pipeline.order


def _name(plan: Plan, cluster: ClusterView) -> str:
    """``2 pipelines side by side: ...; 1f1b; micro 4; recompute full``."""
    micros = dict.fromkeys(
        ceil(pipeline.microbatch / max(stage.mesh.sample_ways for stage in pipeline.stages))
        for pipeline in plan.pipelines
    )
    again = dict.fromkeys(s.recompute for _, _, s in plan.stages() if s.recompute != "off")
    pieces = dict.fromkeys(s.pieces for _, _, s in plan.stages() if s.pieces > 1)
    casts = dict.fromkeys(s.border for _, _, s in plan.stages() if s.border)
    words = [name_of(plan, cluster)]
    words += filter(None, dict.fromkeys(map(_order, plan.pipelines)))
    words.append(f"micro {' and '.join(map(str, micros))}")
    words += [f"recompute {mode}" for mode in again]
    words += [f"{number} pieces" for number in pieces]
    words += [f"borders in {cast}" for cast in casts]
    return "; ".join(words)


def _calls(plan: Plan) -> int:
    """Of stages by micro-batches, forward and backward, on the busiest rank."""
    return max(
        2 * ceil(pipeline.samples / pipeline.microbatch) * len(stages)
        for pipeline in plan.pipelines
        for stages in pipeline.positions()
    )


def _work(cast: Forecast) -> Iterator[tuple[str, float]]:
    computing = dict[str, float]()
    for position in cast.positions:
        kind = position.chip.name
        computing[kind] = max(computing.get(kind, 0.0), position.computing_s)
    for kind, seconds in computing.items():
        yield f"computing on {kind}", seconds
    for way, num_bytes in cast.sent.items():
        yield f"bytes of {way.name}, {way.reach}", num_bytes
    yield "messages inside layers", max(p.communicating_s for p in cast.positions)
    yield "exchange and update", max(cast.time.once_s)
    yield "waiting", cast.slowest.waiting_s
    yield "calls", _calls(cast.plan)


def _leans(cast: Forecast) -> Iterator[tuple[str, float]]:
    """Each thing that may take longer or shorter than predicted."""
    plan, problem, step_s = cast.plan, cast.problem, cast.step_s

    def part(other: Problem) -> float:
        return log(other.time(plan).step_s / step_s) / log(LONGER)

    pools = {pool.chip.name: pool for pool in problem.cluster.pools}
    for name, pool in pools.items():
        usual = problem.knowledge.hardware_of(pool)
        slower = replace(usual, chip=Paced(usual.chip, LONGER))
        hardware = {**problem.knowledge.hardware, name: slower}
        knowledge = replace(problem.knowledge, hardware=hardware)
        yield f"computing on {name}", part(replace(problem, knowledge=knowledge))
    yield "messages inside nodes", part(problem.with_links(1 / LONGER, 1.0))
    yield "messages between nodes", part(problem.with_links(1.0, 1 / LONGER))
    yield "calls of micro-batches", _calls(plan) * CALL_S / step_s
    yield from ((name, 1.0) for name in _has(plan))


def _has(plan: Plan) -> Iterator[str]:
    """What others lack."""
    stages = [stage for _, _, stage in plan.stages()]
    splits = (SCHEDULES[p.schedule].splits_backward for p in plan.pipelines if len(p.stages) > 1)
    has = {
        "backward in halves": any(splits),
        "pipelines side by side": len(plan.pipelines) > 1,
        "borders inside layers": any(any(stage.cut) for stage in stages),
        "a divided head": any(stage.head_rows for stage in stages),
        "recomputation": any(stage.recompute != "off" for stage in stages),
        "activations on hosts": any(offloads(stage.recompute) for stage in stages),
        "ZeRO": any(stage.zero for stage in stages),
    }
    yield from (name for name, is_so in has.items() if is_so)
    yield from _have_meshes(stages)


def _have_meshes(stages: Sequence[StagePlan]) -> Iterator[str]:
    along = {axis for stage in stages for axis, size in stage.mesh.axes if size > 1}
    yield from (f"meshes along {axis}" for axis in sorted(along))
    divided = {e.divides for stage in stages for e in UNLIKE if stage.mesh.shares(e.name)}
    yield from (f"unlike parts of {what}s" for what in sorted(divided))
    if any(stage.sample_shares for stage in stages):
        yield "unlike samples in a mesh"


def _memory(cast: Forecast) -> Iterator[Holding]:
    for position in cast.positions:
        stages = [cast.plan.pipelines[position.pipeline].stages[s] for s in position.stages]
        yield Holding(
            kind=position.chip.name,
            ranks=position.ranks,
            recompute=stages[0].recompute,
            num_bytes=position.memory.by_category(),
            limit_bytes=position.chip.memory_gib * 2**30,
        )

"""Plans for the parts of a mixed cluster and for the whole of it.

Generations are the ways in which mixed training has been done: data parallel with shares by speed
(1), one pipeline whose layers follow speed (2), a pipeline with a mesh for each kind of chip (3),
and unlike pipelines side by side, here each part as it is alone (``pooled``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Literal

from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, Precision, ScheduleName, StagePlan
from weft.virtual.cores import part

Generation = Literal["alone", "pooled", "1", "2", "3"]
_NOWHERE: frozenset[int] = frozenset()
POOLED = "unlike pipelines: each part as it is alone"
NAMES: Mapping[Generation, str] = {
    "pooled": POOLED,
    "1": "1: data parallel by speed",
    "2": "2: pipeline by speed",
    "3": "3: a mesh for each kind",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The job that every trial does."""

    spec: ModelSpec
    seq_len: int
    samples: int
    """Of a step."""
    precision: Precision
    micro: tuple[int, ...] = (2, 4)
    """Sizes of microbatches to try."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The chips of one kind in a cluster."""

    name: str
    ranks: tuple[int, ...]
    """In the whole cluster."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan that is measured."""

    name: str
    plan: Plan
    generation: Generation = "alone"
    instead_of: str = ""
    """Only tried where the trial of this name does not run: it saves memory for time."""


@dataclass(frozen=True, slots=True)
class Alone:
    """The best plan of one kind by itself, and how fast it was."""

    plan: Plan
    samples_s: float
    """Samples a second."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where some layers go."""

    ranks: tuple[int, ...]
    layers: int


@dataclass(frozen=True, slots=True)
class _Line:
    """A pipeline's stages and its share."""

    places: tuple[_Place, ...]
    samples: int


@dataclass(frozen=True, slots=True)
class _Saving:
    """What a plan does to save memory."""

    again: frozenset[int] = frozenset()
    """Ranks that recompute."""
    schedule: ScheduleName = "zb-h1"
    """Of pipelines of several stages: weight gradients that wait hold memory."""


def part_trials(kind: Kind, work: Work) -> list[Trial]:
    """Plans of one kind alone, on ranks 0 to n - 1: data parallel, and a pipeline of its chips."""
    count = len(kind.ranks)
    shares = fastest_shares(work.samples, [1.0] * count)
    whole = [_Line((_Place((n,), work.spec.num_layers),), share) for n, share in enumerate(shares)]
    line = _line([((rank,), 1.0) for rank in range(count)], work)
    again = (_NOWHERE, frozenset(range(count)))
    trials = []
    for micro in work.micro:
        trials += _alike("data parallel", "alone", _plans(work, whole, micro, again))
        if count > 1:
            trials += _alike("pipeline", "alone", _plans(work, [line], micro, again))
    return trials


def mix_trials(kinds: Sequence[Kind], alone: Mapping[str, Alone], work: Work) -> list[Trial]:
    """Every generation over the same cluster (all kinds together), each with several settings.

    Args:
        alone: The best plan of each kind and its measured rate, which sets shares and layers.
    """
    speeds = {
        rank: alone[kind.name].samples_s / len(kind.ranks) for kind in kinds for rank in kind.ranks
    }
    trials = [Trial(POOLED, _pooled(kinds, alone, speeds, work), "pooled")]
    generations: list[Generation] = ["1", "2"]
    if any(len(kind.ranks) > 1 for kind in kinds):
        generations.append("3")
    everyone = frozenset(speeds)
    needy = {r for kind in kinds if recomputes(alone[kind.name].plan) for r in kind.ranks}
    again = (_NOWHERE, frozenset(needy), everyone) if needy else (_NOWHERE, everyone)
    for micro in work.micro:
        for generation in generations:
            lines = _lines(generation, kinds, speeds, work)
            plans = _plans(work, lines, micro, tuple(dict.fromkeys(again)))
            trials += _alike(NAMES[generation], generation, plans)
    return trials


def recomputes(plan: Plan) -> bool:
    """Some stage does its forward twice, to save memory."""
    return any(stage.recompute != "off" for _, _, stage in plan.stages())


def tuned_again(
    trial: Trial, kinds: Sequence[Kind], busy_s: Sequence[float], work: Work
) -> list[Trial]:
    """A trial of generation 1 to 3 with shares and layers by how long each rank was busy in it.

    That counts what a rank's speed alone does not: small microbatches, its end of the exchange,
    its update. Empty where that leads to the same plan; the second one is for what does not fit.
    """
    speeds = {rank: done / busy_s[rank] for rank, done in _done(trial.plan, work).items()}
    stages = [stage for _, _, stage in trial.plan.stages()]
    again = frozenset(r for s in stages if s.recompute != "off" for r in s.mesh.ranks)
    micro = max(line.microbatch for line in trial.plan.pipelines)
    saving = _Saving(again, trial.plan.pipelines[0].schedule)
    lines = _lines(trial.generation, kinds, speeds, work)
    plan = _plan(work, lines, micro, saving)
    if plan == trial.plan:
        return []
    found = replace(trial, name=f"{trial.name}, again", plan=plan, instead_of="")
    if saving.schedule == "1f1b":
        return [found]
    slower = _plan(work, lines, micro, _Saving(again, "1f1b"))
    return [found, replace(found, name=f"{found.name}, 1F1B", plan=slower, instead_of=found.name)]


def _done(plan: Plan, work: Work) -> dict[int, float]:
    """What each rank does of a step, in samples of the whole model."""
    found: dict[int, float] = {}
    for pipeline in plan.pipelines:
        last = len(pipeline.stages) - 1
        for number, stage in enumerate(pipeline.stages):
            piece = part(
                work.spec,
                work.seq_len,
                stage.layers[1] - stage.layers[0],
                embeds=number == 0,
                predicts=number == last,
            )
            for rank in stage.mesh.ranks:
                share = piece * pipeline.samples / len(stage.mesh.ranks)
                found[rank] = found.get(rank, 0.0) + share
    return found


def _ranks(pipeline: PipelinePlan) -> set[int]:
    return {rank for stage in pipeline.stages for rank in stage.mesh.ranks}


def _lines(
    generation: Generation, kinds: Sequence[Kind], speeds: Mapping[int, float], work: Work
) -> list[_Line]:
    """The pipelines of a generation, for ranks of given speeds."""
    ranks = [rank for kind in kinds for rank in kind.ranks]
    if generation == "1":
        layers = work.spec.num_layers
        shares = fastest_shares(work.samples, [speeds[rank] for rank in ranks])
        both = zip(ranks, shares, strict=True)
        return [_Line((_Place((rank,), layers),), share) for rank, share in both]
    if generation == "2":
        return [_line([((rank,), speeds[rank]) for rank in ranks], work)]
    assert generation == "3", f"a plan of generation {generation} is not made of lines"
    meshes = [(kind.ranks, sum(speeds[rank] for rank in kind.ranks)) for kind in kinds]
    return [_line(meshes, work)]


def _line(meshes: Sequence[tuple[tuple[int, ...], float]], work: Work) -> _Line:
    """One pipeline over meshes of given speeds."""
    layers = balanced_layers([speed for _, speed in meshes], work.spec, work.seq_len)
    places = (_Place(ranks, n) for (ranks, _), n in zip(meshes, layers, strict=True))
    return _Line(tuple(places), work.samples)


def balanced_layers(speeds: Sequence[float], spec: ModelSpec, seq_len: int) -> list[int]:
    """Layers of consecutive stages whose slowest one is fastest.

    The first also has the embedding, the last the head. Exact: every way of cutting the layers,
    by dynamic programming.
    """
    last = len(speeds) - 1

    def seconds(stage: int, layers: int) -> float:
        cost = part(spec, seq_len, layers, embeds=stage == 0, predicts=stage == last)
        return cost / speeds[stage]

    @cache
    def best(stage: int, left: int) -> tuple[float, tuple[int, ...]]:
        if stage == last:
            return seconds(stage, left), (left,)
        found = []
        for mine in range(left + 1):
            slowest, rest = best(stage + 1, left - mine)
            found.append((max(seconds(stage, mine), slowest), (mine, *rest)))
        return min(found)

    return list(best(0, spec.num_layers)[1])


def fastest_shares(samples: int, speeds: Sequence[float]) -> list[int]:
    """Samples for each, so that the last one is done soonest; at least one each.

    Sample by sample to whoever is done with it first, which is exact.
    """
    assert samples >= len(speeds), f"{samples} samples for {len(speeds)} ranks"
    shares = [1] * len(speeds)
    for _ in range(samples - len(speeds)):
        ends = [(share + 1) / speed for share, speed in zip(shares, speeds, strict=True)]
        shares[ends.index(min(ends))] += 1
    return shares


def _alike(name: str, generation: Generation, plans: Mapping[str, Plan]) -> list[Trial]:
    """Each only where the one before it does not run."""
    names = [f"{name}, {settings}" for settings in plans]
    before = {other: one for one, other in pairwise(names)}
    return [
        Trial(full, plan, generation, instead_of=before.get(full, ""))
        for full, plan in zip(names, plans.values(), strict=True)
    ]


def _plans(
    work: Work, lines: Sequence[_Line], micro: int, again: Sequence[frozenset[int]]
) -> dict[str, Plan]:
    """The same that save more and more memory for time, by what is said of it."""
    savings = [_Saving(ranks) for ranks in again]
    if any(len(line.places) > 1 for line in lines):
        savings[1:] = [_Saving(ranks, "1f1b") for ranks in again]
    found = {}
    for saving in savings:
        slower = ", 1F1B" if saving.schedule == "1f1b" else ""
        name = f"micro {micro}{slower}{_recomputing(saving.again, lines)}"
        found[name] = _plan(work, lines, micro, saving)
    return found


def _recomputing(ranks: frozenset[int], lines: Sequence[_Line]) -> str:
    everyone = {rank for line in lines for place in line.places for rank in place.ranks}
    if not ranks:
        return ""
    where = "" if ranks == everyone else f" on rank {', '.join(map(str, sorted(ranks)))}"
    return f", recompute{where}"


def _plan(work: Work, lines: Sequence[_Line], micro: int, saving: _Saving) -> Plan:
    pipelines = (_pipeline(work, line, micro, saving) for line in lines)
    return Plan(num_layers=work.spec.num_layers, pipelines=tuple(pipelines))


def _pipeline(work: Work, line: _Line, micro: int, saving: _Saving) -> PipelinePlan:
    stages, first = [], 0
    for place in line.places:
        stages.append(
            StagePlan(
                mesh=Mesh.of(place.ranks, dp=len(place.ranks)),
                layers=(first, first + place.layers),
                precision=work.precision,
                recompute="full" if saving.again & set(place.ranks) else "off",
            )
        )
        first += place.layers
    return PipelinePlan(
        stages=tuple(stages),
        samples=line.samples,
        microbatch=min(micro, line.samples),
        schedule=saving.schedule if len(stages) > 1 else "1f1b",
    )


def _pooled(
    kinds: Sequence[Kind], alone: Mapping[str, Alone], speeds: Mapping[int, float], work: Work
) -> Plan:
    """The parts' own plans side by side; only their shares of the batch change."""
    moved = [
        _moved(pipeline, kind.ranks)
        for kind in kinds
        for pipeline in alone[kind.name].plan.pipelines
    ]
    rates = [sum(speeds[rank] for rank in _ranks(pipeline)) for pipeline in moved]
    shares = fastest_shares(work.samples, rates)
    pipelines = [
        replace(pipeline, samples=share, microbatch=min(pipeline.microbatch, share))
        for pipeline, share in zip(moved, shares, strict=True)
    ]
    return Plan(num_layers=work.spec.num_layers, pipelines=tuple(pipelines))


def _moved(pipeline: PipelinePlan, ranks: Sequence[int]) -> PipelinePlan:
    """On other ranks."""
    stages = tuple(
        replace(stage, mesh=Mesh(tuple(ranks[r] for r in stage.mesh.ranks), stage.mesh.axes))
        for stage in pipeline.stages
    )
    return replace(pipeline, stages=stages)

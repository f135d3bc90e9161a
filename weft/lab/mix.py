"""Plans for the parts of a mixed cluster and for the whole of it, and what mixing them costs.

Efficiency is the rate of the mix divided by the sum of the rates of its parts, each part tuned
alone with the same job (the definition of FlagScale's reports of mixed training). The gain of
pooling is what the parts' own plans reach side by side, over the faster part; the gain of
re-planning is what the best plan of the mix adds to that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median
from typing import Any

from weft.cost.flops import forward_flops_per_token
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, Precision, Recompute, ScheduleName, StagePlan
from weft.plan.tiling import split_by_weight

RECOMPUTE: tuple[Recompute, ...] = ("off", "full")
POOLED = "unlike pipelines: each part as it is alone"


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The job that every trial does."""

    spec: ModelSpec
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
    instead_of: str = ""
    """Only tried where the trial of this name does not run: it saves memory for time."""


@dataclass(slots=True)
class Rates:
    """Tokens per second of a trial, one for each repeat; or why there are none."""

    trial: Trial
    values: list[float] = field(default_factory=list)
    problem: str = ""

    @property
    def middle(self) -> float:
        return median(self.values) if self.values else 0.0

    @property
    def spread(self) -> float:
        """(largest - smallest) / middle."""
        return (max(self.values) - min(self.values)) / self.middle if self.values else 0.0


def part_trials(kind: Kind, work: Work) -> list[Trial]:
    """Plans of one kind alone, on ranks 0 to n - 1: data parallel, and a pipeline of its chips."""
    count = len(kind.ranks)
    trials = []
    for micro in work.micro:
        shares = split_by_weight(work.samples, [1] * count)
        whole = [
            _Line((_Place((n,), work.spec.num_layers),), share) for n, share in enumerate(shares)
        ]
        trials += _both("data parallel", work, whole, micro)
        if count > 1:
            layers = balanced_layers([1.0] * count, work.spec)
            places = tuple(_Place((rank,), n) for rank, n in enumerate(layers))
            trials += _both("pipeline", work, [_Line(places, work.samples)], micro)
    return trials


def mix_trials(kinds: Sequence[Kind], alone: Mapping[str, Rates], work: Work) -> list[Trial]:
    """Generations 1 to 3 and unlike pipelines over the same cluster (all kinds together).

    Args:
        alone: The best trial of each kind and its measured rate, which sets shares and layers.
    """
    per_chip = {kind.name: alone[kind.name].middle / len(kind.ranks) for kind in kinds}
    ranks = [(rank, per_chip[kind.name]) for kind in kinds for rank in kind.ranks]
    num_layers = work.spec.num_layers
    trials = [Trial(POOLED, _pooled(kinds, alone, work))]
    shares = _shares(work.samples, [rate for _, rate in ranks])
    side = [
        _Line((_Place((rank,), num_layers),), share)
        for (rank, _), share in zip(ranks, shares, strict=True)
    ]
    lines = {
        "1: data parallel by speed": side,
        "2: pipeline by speed": [_line([((rank,), rate) for rank, rate in ranks], work)],
    }
    if any(len(kind.ranks) > 1 for kind in kinds):
        meshes = [(kind.ranks, alone[kind.name].middle) for kind in kinds]
        lines["3: a mesh for each kind"] = [_line(meshes, work)]
    for micro in work.micro:
        for name, pipelines in lines.items():
            trials += _both(name, work, pipelines, micro)
    return trials


def _line(meshes: Sequence[tuple[tuple[int, ...], float]], work: Work) -> _Line:
    """One pipeline over meshes of given speeds."""
    layers = balanced_layers([speed for _, speed in meshes], work.spec)
    places = (_Place(ranks, n) for (ranks, _), n in zip(meshes, layers, strict=True))
    return _Line(tuple(places), work.samples)


def flops_of_layer(spec: ModelSpec) -> tuple[float, float]:
    """Forward FLOPs of one token in one layer, and in the head."""
    whole = forward_flops_per_token(spec, spec.seq_len)
    head = 2 * spec.d_model * spec.vocab_size
    return (whole - head) / spec.num_layers, head


def balanced_layers(speeds: Sequence[float], spec: ModelSpec) -> list[int]:
    """Layers of consecutive stages whose slowest one is fastest; the last also has the head.

    Exact: every way of cutting the layers, by dynamic programming.
    """
    layer, head = flops_of_layer(spec)
    last = len(speeds) - 1

    @cache
    def best(stage: int, left: int) -> tuple[float, tuple[int, ...]]:
        if stage == last:
            return (left * layer + head) / speeds[stage], (left,)
        found = []
        for mine in range(left + 1):
            slowest, rest = best(stage + 1, left - mine)
            found.append((max(mine * layer / speeds[stage], slowest), (mine, *rest)))
        return min(found)

    return list(best(0, spec.num_layers)[1])


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


def _both(name: str, work: Work, lines: Sequence[_Line], micro: int) -> list[Trial]:
    """Without recomputation, and with it where that does not fit."""
    plain = f"{name}, micro {micro}"
    plans = {
        recompute: Plan(
            num_layers=work.spec.num_layers,
            pipelines=tuple(
                _pipeline(work, line.places, line.samples, micro, recompute) for line in lines
            ),
        )
        for recompute in RECOMPUTE
    }
    return [
        Trial(plain, plans["off"]),
        Trial(f"{plain}, recompute", plans["full"], instead_of=plain),
    ]


def _pipeline(
    work: Work, places: Sequence[_Place], samples: int, micro: int, recompute: Recompute
) -> PipelinePlan:
    stages, first = [], 0
    for place in places:
        stages.append(
            StagePlan(
                mesh=Mesh.of(place.ranks, dp=len(place.ranks)),
                layers=(first, first + place.layers),
                precision=work.precision,
                recompute=recompute,
            )
        )
        first += place.layers
    schedule: ScheduleName = "zb-h1" if len(places) > 1 else "1f1b"
    return PipelinePlan(
        stages=tuple(stages), samples=samples, microbatch=min(micro, samples), schedule=schedule
    )


def _shares(samples: int, speeds: Sequence[float]) -> list[int]:
    """At least one sample each, so that every rank of the cluster has a seat."""
    spare = split_by_weight(samples - len(speeds), [round(1000 * s) or 1 for s in speeds])
    exact = split_by_weight(samples, [round(1000 * s) or 1 for s in speeds])
    return exact if min(exact) else [share + 1 for share in spare]


def _pooled(kinds: Sequence[Kind], alone: Mapping[str, Rates], work: Work) -> Plan:
    """The parts' own plans side by side; only their shares of the batch change."""
    pipelines = []
    shares = _shares(work.samples, [alone[kind.name].middle for kind in kinds])
    for kind, share in zip(kinds, shares, strict=True):
        own = alone[kind.name].trial.plan
        parts = _shares(share, [pipeline.samples for pipeline in own.pipelines])
        for pipeline, samples in zip(own.pipelines, parts, strict=True):
            pipelines.append(_moved(pipeline, kind.ranks, samples))
    return Plan(num_layers=work.spec.num_layers, pipelines=tuple(pipelines))


def _moved(pipeline: PipelinePlan, ranks: Sequence[int], samples: int) -> PipelinePlan:
    """On other ranks, with another share."""
    stages = tuple(
        replace(stage, mesh=Mesh(tuple(ranks[r] for r in stage.mesh.ranks), stage.mesh.axes))
        for stage in pipeline.stages
    )
    microbatch = min(pipeline.microbatch, samples)
    return replace(pipeline, stages=stages, samples=samples, microbatch=microbatch)


@dataclass(frozen=True)
class MixReport:
    """What the parts reach, what the mix reaches, and what of it comes from where."""

    parts: Mapping[str, Rates]
    mixes: Sequence[Rates]

    @property
    def lower(self) -> float:
        """The faster part alone."""
        return max(rates.middle for rates in self.parts.values())

    @property
    def upper(self) -> float:
        """All parts at their own rates."""
        return sum(rates.middle for rates in self.parts.values())

    @property
    def best(self) -> Rates:
        return max(self.mixes, key=lambda rates: rates.middle)

    @property
    def pooled(self) -> Rates:
        return next(rates for rates in self.mixes if rates.trial.name == POOLED)

    @property
    def efficiency(self) -> float:
        return self.best.middle / self.upper

    @property
    def replanning_gain(self) -> float | None:
        """None where the parts' own plans do not run side by side."""
        return self.best.middle / self.pooled.middle if self.pooled.values else None

    def to_json(self) -> dict[str, Any]:
        spreads = [rates.spread for rates in [*self.parts.values(), self.best]]
        return {
            "parts": {name: rates.middle for name, rates in self.parts.items()},
            "lower": self.lower,
            "upper": self.upper,
            "mix": self.best.middle,
            "efficiency": self.efficiency,
            "pooling_gain": self.pooled.middle / self.lower,
            "replanning_gain": self.best.middle / self.pooled.middle
            if self.pooled.values
            else None,
            "repeats": len(self.best.values),
            "spread": max(spreads),
            "plans": {
                "parts": {name: rates.trial.name for name, rates in self.parts.items()},
                "mix": self.best.trial.name,
            },
            "trials": [
                {
                    "name": rates.trial.name,
                    "tokens_per_s": rates.middle,
                    "spread": rates.spread,
                    "problem": rates.problem,
                }
                for rates in self.mixes
            ],
        }

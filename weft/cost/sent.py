"""Bytes that a step of a plan sends, by what for and how far: what ``--comm-report`` counts.

Formulas of the runtime's own collectives, added up over all ranks. An element that ``n`` ranks hold
costs ``n - 1`` times its bytes to sum onto its owner, and again to send back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import Literal, NamedTuple

from weft.cluster.view import ClusterView
from weft.cost.choice import axes_of
from weft.cost.work import DIVISIONS, STATES, share
from weft.models.registry import shape_of
from weft.models.shape import ModelShape
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, StagePlan

Reach = Literal["node", "across"]
Purpose = Literal[
    "gather seq", "scatter seq", "vocab sums", "activations", "gradients", "parameters"
]


class Way(NamedTuple):
    """One row of a table of traffic."""

    name: Purpose
    reach: Reach
    """As far as any two of the ranks that talk are apart."""


def sent_by_plan(
    plan: Plan, spec: ModelSpec, cluster: ClusterView, *, seq_len: int
) -> Mapping[Way, float]:
    """Bytes of one step, of all ranks together."""
    shape = shape_of(spec)
    total: defaultdict[Way, float] = defaultdict(float)
    for pipeline in plan.pipelines:
        for number, stage in enumerate(pipeline.stages):
            for name, num_bytes in _inside(shape, pipeline, number, seq_len):
                inside = [axis for axis in DIVISIONS if "d_ff" in DIVISIONS[axis].inner]
                total[Way(name, _reach(cluster, _along(stage.mesh, inside)))] += num_bytes
        for one, other in pairwise(pipeline.stages):
            if one.mesh.ranks != other.mesh.ranks:
                border = _reach(cluster, (*one.mesh.ranks, *other.mesh.ranks))
                residual = pipeline.samples * seq_len * shape.d_model * _width(one)
                total[Way("activations", border)] += 2 * residual
    for way, num_bytes in _state(plan, shape, cluster):
        total[way] += num_bytes
    return {way: total[way] for way in sorted(total) if total[way]}


def _width(stage: StagePlan) -> float:
    return STATES[stage.precision].weight


def _along(mesh: Mesh, axes: Sequence[str]) -> tuple[int, ...]:
    """The first group along some axes: it reaches as far as the others."""
    positions = product(*(range(mesh.size(axis)) for axis in axes))
    return tuple(mesh.rank_at(**dict(zip(axes, at, strict=True))) for at in positions)


def _reach(cluster: ClusterView, ranks: tuple[int, ...]) -> Reach:
    return "node" if cluster.share_a_node(ranks) else "across"


def _inside(
    shape: ModelShape, pipeline: PipelinePlan, number: int, seq_len: int
) -> Iterator[tuple[Purpose, float]]:
    """Of a stage's divided layers: sums are scattered along the sequence, then gathered.

    A layer does each twice in forward and twice in backward. The second forward of a recomputed
    one ends before its last sum.
    """
    stage = pipeline.stages[number]
    ways = share(axes_of(stage.mesh), "d_ff")
    if ways == 1:
        return
    layers = stage.layers[1] - stage.layers[0]
    again = layers * (stage.recompute == "full")
    ends = (number == 0) + (number == len(pipeline.stages) - 1)
    tokens = pipeline.samples * seq_len
    once = (ways - 1) * tokens * shape.d_model * _width(stage)
    yield "gather seq", once * (4 * layers + 2 * again + ends)
    yield "scatter seq", once * (4 * layers + again + ends)
    if number == len(pipeline.stages) - 1:
        wide = 8 if stage.precision == "fp64" else 4
        yield "vocab sums", 2 * (ways - 1) * tokens * 3 * wide


class _Piece(NamedTuple):
    """Parameters that the same stages hold."""

    params: float
    stages: tuple[tuple[PipelinePlan, StagePlan], ...]
    stays: float = 0.0
    """Of layers: the first one's, which level 3 keeps from a backward to the next forward, and
    where no head follows the last one's, which it keeps from a forward to its backward."""
    part: Literal["layers", "embed", "head"] = "layers"


def _state(plan: Plan, shape: ModelShape, cluster: ClusterView) -> Iterator[tuple[Way, float]]:
    """Gradients and parameters of what several ranks hold, piece by piece of the model."""
    alike = [axis for axis in DIVISIONS if DIVISIONS[axis].copies]
    for piece in _pieces(plan, shape):
        ranks = tuple(rank for _, stage in piece.stages for rank in _along(stage.mesh, alike))
        if len(ranks) == 1 or not piece.params:
            continue
        reach, copies = _reach(cluster, ranks), len(ranks) - 1
        pipeline, stage = piece.stages[0]
        level = min(stage.zero for _, stage in piece.stages)
        times, gathered = _rounds(piece, level, pipeline.num_microbatches, stage.passes)
        state = STATES[stage.precision]
        yield Way("gradients", reach), copies * piece.params * state.grad * times
        yield Way("parameters", reach), copies * gathered * state.weight


def _rounds(piece: _Piece, level: int, backwards: int, passes: int) -> tuple[float, float]:
    """How often each gradient is sent, and how many parameters are gathered in a step.

    What several stages hold is reduced once a step, whatever its level. Level 3 is counted for
    forwards and backwards that take turns: some layers stay from one to the next.
    """
    if level == 0:
        return 2, 0
    if level == 1 or len(piece.stages) > 1:
        return 1, piece.params
    if level == 2:
        return backwards, piece.params
    many = backwards * passes
    match piece.part:
        case "embed":  # its backward needs no weights
            gathered = many * piece.params
        case "head":  # stays from the last pass of a forward to the first of its backward
            gathered = (2 * many - backwards) * piece.params
        case "layers":
            gathered = 2 * many * piece.params - (backwards - 1) * piece.stays
    return backwards, gathered


def _pieces(plan: Plan, shape: ModelShape) -> Iterator[_Piece]:
    """Tables, and runs of layers that no pipeline cuts."""
    cuts = {edge for _, _, stage in plan.stages() for edge in stage.layers}
    for first, end in pairwise(sorted(cuts | {0, plan.num_layers})):
        layer = shape.dense_params(first) + shape.expert_params(first)
        holders = tuple((pipeline, _holder(pipeline, first)) for pipeline in plan.pipelines)
        stays = layer if end == plan.num_layers else 2 * layer
        yield _Piece((end - first) * layer, holders, stays=stays)
    embed = tuple((pipeline, pipeline.stages[0]) for pipeline in plan.pipelines)
    head = tuple((pipeline, pipeline.stages[-1]) for pipeline in plan.pipelines)
    positions = shape.num_positions * shape.d_model
    if shape.tied:
        both = tuple(held for held in head if held not in embed)
        yield _Piece(shape.table_params, (*embed, *both), part="embed")
    else:
        yield _Piece(shape.table_params, embed, part="embed")
        yield _Piece(shape.table_params, head, part="head")
    yield _Piece(positions, embed, part="embed")
    yield _Piece(shape.norm_params, head, part="head")


def _holder(pipeline: PipelinePlan, layer: int) -> StagePlan:
    return next(s for s in pipeline.stages if s.layers[0] <= layer < s.layers[1])

"""Bytes that a step of a plan sends, by what for and how far: what ``--comm-report`` counts.

What layers send is ``weft.cost.sends``'s; here it is added up over all ranks. An element that ``n``
ranks hold costs ``n - 1`` times its bytes to sum onto its owner, and again to send back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from math import prod
from operator import itemgetter
from statistics import fmean
from typing import Literal, NamedTuple

from weft.axes.registry import AXES
from weft.cluster.view import ClusterView, Reach
from weft.cost.choice import alike, choice_of
from weft.cost.sends import (
    LayerSend,
    border_bytes,
    border_width,
    gathered_part,
    layer_sends,
    ranks_of,
    sums_part,
)
from weft.cost.work import (
    ALL_BY_ADAMW,
    DIVISIONS,
    MEAN,
    StageWork,
    StateBytes,
    Training,
    layers_alike,
    width_of,
)
from weft.models.registry import FAMILIES, dims_of_param, layout_of, param_specs, shape_of
from weft.models.shape import ModelShape
from weft.plan.layout import places_at
from weft.plan.model import ModelSpec, UnitName
from weft.plan.plan import PipelinePlan, Plan, StagePlan

COUNT_BYTES = 8
"""Of how many tokens go to an expert."""
Purpose = Literal[
    "gather seq",
    "scatter seq",
    "vocab sums",
    "heads",
    "keys",
    "experts",
    "expert counts",
    "activations",
    "gradients",
    "parameters",
]


class Way(NamedTuple):
    """One row of a table of traffic."""

    name: Purpose
    reach: Reach
    """As far as any two of the ranks that talk are apart."""


def sent_by_plan(
    plan: Plan,
    spec: ModelSpec,
    cluster: ClusterView,
    *,
    seq_len: int,
    training: Training = ALL_BY_ADAMW,
) -> Mapping[Way, float]:
    """Bytes of one step, of all ranks together."""
    shape = shape_of(spec)
    total: defaultdict[Way, float] = defaultdict(float)

    def add(name: Purpose, ranks: Sequence[int], num_bytes: float) -> None:
        total[Way(name, cluster.reach(ranks))] += num_bytes

    for pipeline in plan.pipelines:
        for number in range(len(pipeline.stages)):
            for name, ranks, num_bytes in _inside(shape, pipeline, number, seq_len, cluster):
                add(name, ranks, num_bytes)
        for giver, taker in pipeline.borders:
            one, other = pipeline.stages[giver], pipeline.stages[taker]
            if one.mesh.ranks != other.mesh.ranks:
                sizes = pipeline.samples, seq_len, border_width(pipeline, giver, shape.d_model)
                each_way = border_bytes(one.precision, *sizes, cast=one.border)
                ways = 1 if giver in pipeline.heads else 2
                add("activations", (*one.mesh.ranks, *other.mesh.ranks), ways * each_way)
    for piece in _pieces(plan, spec, training):
        for name, ranks, num_bytes in _once(plan, piece, training):
            add(name, ranks, num_bytes)
    return {way: total[way] for way in sorted(total) if total[way]}


def _inside(
    shape: ModelShape, pipeline: PipelinePlan, number: int, seq_len: int, cluster: ClusterView
) -> Iterator[tuple[Purpose, Sequence[int], float]]:
    """Of a stage's divided layers and ends, with some ranks that talk so.

    A sum is scattered along the sequence, then gathered; backward sends as much. What is computed
    again ends before its last sum. Each end gathers once and scatters once.
    """
    stage = pipeline.stages[number]
    work = choice_of(pipeline, number, seq_len).work
    # All ranks together have all heads.
    work = work._replace(samples=pipeline.samples / work.share("samples"), widths=MEAN)
    width = width_of(stage.precision)
    many = prod(size for _, size in work.axes)
    calls = pipeline.num_microbatches * stage.passes
    predicts = work.predicts > 0  # a part of the head as much: all tokens, and all their numbers
    for each, (experts, branch), layers in layers_alike(shape, work):
        for send in layer_sends(shape, each, experts=experts, branch=branch):
            if send.what == "experts":
                both = _exchanged(send, each, stage, cluster, calls)
                yield from ((name, ranks, layers * once) for name, ranks, once in both)
                continue
            groups, ranks = many // send.group.size, ranks_of(send, stage.mesh)
            times = layers * groups * (send.group.size - 1)
            once = times * send.num_bytes * width / work.wide
            if send.what == "sums":
                gathers = 2 * send.times + each.gathers_again(branch)
                scatters = 2 * send.times + each.scatters_again(branch)
                yield "gather seq", ranks, once * gathers
                yield "scatter seq", ranks, once * scatters
            else:
                yield send.what, ranks, once * _forwards(send, each, width)
    for axis, size in work.axes:
        if "vocab" in DIVISIONS[axis].inner:
            tokens = (size - 1) * work.tokens * (many // size)
            ranks = next(stage.mesh.groups(axis))
            ends = (work.embeds + predicts) * width * shape.d_model
            yield "gather seq", ranks, tokens * ends
            yield "scatter seq", ranks, tokens * ends
            yield "vocab sums", ranks, 2 * tokens * 3 * max(4, width) * predicts


def _exchanged(
    send: LayerSend, work: StageWork, stage: StagePlan, cluster: ClusterView, calls: int
) -> Iterator[tuple[Purpose, Sequence[int], float]]:
    """Of one layer's tokens to experts and back, by step of their way, and of how many come, which
    is said ahead of each forward. What a rank has when a step begins goes to all in it alike: to
    each other one a message of that part, so among N nodes of L ranks N - 1 of L times as much as
    the N L - L that leave a node where all goes at once.

    ``calls``: forwards of the stage in a step.
    """
    again = 1 + work.forward_again
    many, every = prod(size for _, size in work.axes), len(stage.mesh.ranks)
    for ranks in exchange_steps(stage, send.axis, cluster):
        others = (len(ranks) - 1) / len(ranks)
        inside = cluster.reach(ranks) == "node"
        wide = send.num_bytes * width_of(stage.precision) / work.wide
        tokens = send.cast_bytes if send.is_cast(inside=inside) else wide
        yield "experts", ranks, many * others * (1 + again) * send.times * send.copies * tokens
        said = stage.expert_pieces * send.num_experts * COUNT_BYTES
        yield "expert counts", ranks, every * others * again * calls * said


def exchange_steps(stage: StagePlan, axis: str, cluster: ClusterView) -> Iterator[tuple[int, ...]]:
    """Ranks that exchange tokens in each step of their way, some of each."""
    ranks = next(stage.mesh.groups(axis))
    near = AXES[axis].near_ways(stage, [str(cluster.node_of(rank)) for rank in ranks])
    yield from ([ranks] if near in (1, len(ranks)) else [ranks[:near], ranks[::near]])


def _forwards(send: LayerSend, work: StageWork, width: int) -> float:
    """How many times a forward's bytes a step sends. Where keys go round their gradients do so
    behind them, and home."""
    home = 0.0 if send.what == "heads" or work.gathers_keys else max(4, width) / width
    return 2 + work.attention_again + home


def _once(
    plan: Plan, piece: _Piece, training: Training
) -> Iterator[tuple[Purpose, Sequence[int], float]]:
    """Of what ranks hold in common, with those that talk: inside each domain, then between them."""
    ranks = [rank for _, s in piece.stages for rank in alike(s.mesh, experts=piece.experts)]
    state = training.state(piece.stages[0][1].precision)
    domains = plan.by_domain(ranks)
    for domain in domains:
        within = piece.within(domain)
        gradients, parameters = within.sent(state)
        more = within.copied
        far = [rank for _, s in within.stages for rank in s.mesh.ranks] if more else domain
        yield "gradients", far, (len(domain) - 1 + more) * gradients
        yield "parameters", far, (len(domain) - 1 + more) * parameters
    once = state.grad * sums_part(plan.sums, state.grad) * piece.params
    yield "gradients", ranks, 2 * (len(domains) - 1) * once


class _Piece(NamedTuple):
    """Parameters that are trained and that the same stages hold."""

    params: float
    stages: tuple[tuple[PipelinePlan, StagePlan], ...]
    end: str
    """``embed`` or ``head``; of layers empty."""
    stays: float
    """Of layers: the first one's, which level 3 keeps from a backward to the next forward, and
    where no head follows the last one's, which it keeps from a forward to its backward."""
    level: int
    """The lowest of all stages that have some of such a parameter."""
    experts: bool = False
    """Of experts that some stages divide among ranks which hold all else alike."""
    narrow: float = 0.0
    """The part of it that products in eight bits may read."""

    @property
    def copied(self) -> float:
        """Ranks that hold an expert because there are copies of it, in the mean of all."""
        several = (stage for _, stage in self.stages if self.experts and stage.expert_places)
        return sum(_copied(stage) for stage in several)

    def within(self, domain: Collection[int]) -> _Piece:
        """As the ranks of one domain hold it."""
        here = [each for each in self.stages if not {*each[1].mesh.ranks}.isdisjoint(domain)]
        return self._replace(stages=tuple(here))

    def sent(self, state: StateBytes) -> tuple[float, float]:
        """Bytes of gradients and of parameters that each of them sends in a step but one.

        What several stages hold is reduced once a step, whatever its level. Level 3 is counted for
        forwards and backwards that take turns: some layers stay from one to the next.
        """
        pipeline, stage = self.stages[0]
        backwards = pipeline.num_microbatches
        gathers = min((each.gather for _, each in self.stages), key=len)
        weight = state.weight * gathered_part(gathers, self.narrow, state.weight)
        casts = {each.reduction for _, each in self.stages}
        reduced = sums_part(casts.pop(), state.grad) if len(casts) == 1 else 1.0
        once, whole = state.grad * reduced * self.params, weight * self.params
        if self.level == 0:
            return 2 * once, 0
        if self.level == 1 or len(self.stages) > 1:
            return once, whole
        if self.level == 2:
            return backwards * once, whole
        many = backwards * stage.passes
        match self.end:
            case "embed":  # its backward needs no weights
                gathered = many * self.params
            case "head":  # stays from the last pass of a forward to the first of its backward
                gathered = (2 * many - backwards) * self.params
            case _:
                gathered = 2 * many * self.params - (backwards - 1) * self.stays
        return backwards * once, weight * gathered


def _copied(stage: StagePlan) -> float:
    """As ``_Piece.copied``, of one stage."""
    copies = [len(places_at(at)) - 1 for places in stage.expert_places for at in places]
    return fmean(copies) * sum(1 for _ in alike(stage.mesh, experts=True))


def narrow_part(spec: ModelSpec, training: Training) -> float:
    """Of the parameters of layers, those that products in eight bits read."""
    inside = [param for param in param_specs(spec) if isinstance(param.unit, int)]
    matrices = sum(param.numel for param in inside if len(param.shape) == 2)
    return (1 - training.wide_products) * matrices / max(1, sum(each.numel for each in inside))


_Part = tuple[frozenset[UnitName], range, bool]
"""What has the same holders: units of the model; of the head's rows which, none: all; experts that
are divided."""


def _pieces(plan: Plan, spec: ModelSpec, training: Training) -> Iterator[_Piece]:
    """The ends of the model, and runs of layers that no pipeline cuts. Of the head's rows one for
    all that the same stages have."""
    numels, last = _numels(plan, spec, training), plan.places[-1]
    narrow = narrow_part(spec, training)
    in_turn = sorted(numels, key=itemgetter(2))  # a layer after the other, of either kind
    for (end, stages, experts), run in groupby(in_turn, key=partial(_held, plan)):
        runs = list(run)
        counts = [numels[key] for key in runs]
        stays = counts[0] + (0 if last in runs[-1][0] else counts[-1])
        holders = tuple((plan.pipelines[p], stage) for p, _, stage in stages)
        level = min(stage.zero for key in runs for _, _, stage in plan.stages_with(key[0]))
        part = 0.0 if end or experts else narrow
        yield _Piece(sum(counts), holders, end, stays, level, experts, part)


def _numels(plan: Plan, spec: ModelSpec, training: Training) -> dict[_Part, float]:
    """Parameters that are trained of each."""
    found: defaultdict[_Part, float] = defaultdict(float)
    cuts, layout, head_dim = plan.cuts, layout_of(spec), FAMILIES[spec.family].head_dim
    rows = sorted({row for _, _, stage in plan.stages() for row in stage.head_rows or ()})
    cut = _cut_beside_samples(plan)
    for param in param_specs(spec):
        units = frozenset(param.places if param.places & cuts else param.units)
        numel = training.part(param.unit) * param.numel
        names = {dim.name for dim in dims_of_param(param, layout)}
        if not rows or "head" not in units or head_dim not in names:
            found[units, range(0), not names.isdisjoint(cut)] += numel
            continue
        for low, high in pairwise(rows):
            found[units, range(low, high), False] += numel * (high - low) / rows[-1]
    return found


def _cut_beside_samples(plan: Plan) -> set[str]:
    """Dimensions of parameters that ranks divide which hold all else alike."""
    sizes = {axis for _, _, stage in plan.stages() for axis in stage.mesh.axes}
    used = [DIVISIONS[name] for name, size in sizes if size > 1]
    return {dim for division in used if division.copies for dim in division.param}


def _held(plan: Plan, part: _Part) -> tuple[str, list[tuple[int, int, StagePlan]], bool]:
    """Which end of the model it is of, the stages that have it, and whether it is of experts."""
    units, rows, experts = part
    ends = [unit for unit in units if isinstance(unit, str)]
    having = [each for each in plan.stages_with(units) if _has(each[2], rows)]
    return min(ends, default=""), having, experts


def _has(stage: StagePlan, rows: range) -> bool:
    """Of what is divided by the head's rows, it has these."""
    return not rows or stage.head_rows is None or rows.start in range(*stage.head_rows)

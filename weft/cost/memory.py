"""Memory of every rank, by category: parameters at rest, what microbatches keep, what work needs.

``stage_memory`` is a function of numbers alone and answers for one rank of one stage; searches call
it thousands of times a second. ``memory_of_plan`` asks it for every position of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import ceil, floor
from types import MappingProxyType

from weft.cluster.cluster import HOST
from weft.cost.activations import logits, stage_away, stage_beside, stage_kept, stage_working
from weft.cost.choice import StageChoice, choice_of, state_parts, ways_of_domains
from weft.cost.sends import message_part
from weft.cost.work import (
    ALL_BY_ADAMW,
    ALL_PARTS,
    EVEN,
    SHARED_FROM,
    Axes,
    StageWork,
    Training,
    Widths,
    share,
)
from weft.memory.tiers import NUM_ROOMS, PIECE_BYTES, keeps_apart
from weft.models.registry import shape_of
from weft.models.shape import Branch, ModelShape
from weft.plan.borders import Layers, in_parts
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.precision.roles import Tier
from weft.recompute.asked import offloads
from weft.recompute.registry import MODES
from weft.schedules.border_memory import borders_at_peak
from weft.schedules.known import Pattern, held_at_peak, waiting_at_peak

BUCKET_BYTES = 8 << 20
"""Of one bucket of gradients; one is filled while one is on its way."""


LIBRARY_BYTES = BUCKET_BYTES
"""That a library of collectives takes for itself besides, on a processor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on one rank at the step's peak, by what they are for."""

    weights: float = 0.0
    grads: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    """Kept by the microbatches in flight."""
    working: float = 0.0
    """One layer, or the head, while it computes."""
    logits: float = 0.0
    buffers: float = 0.0
    """Of collectives and borders."""
    fragments: float = 0.0
    """Free, but in pieces too small to be used."""
    runtime: float = 0.0
    """Driver, kernels and communication libraries, whatever the model."""

    @property
    def total(self) -> float:
        """All of it; searches ask often, so it is spelled out."""
        moving = self.activations + self.working + self.logits + self.buffers
        return self.weights + self.grads + self.optimizer + moving + self.fragments + self.runtime

    def by_category(self) -> dict[str, float]:
        """Name -> bytes."""
        return asdict(self)

    @property
    def state(self) -> float:
        """Of parameters at rest."""
        return self.weights + self.grads + self.optimizer

    def __add__(self, other: Memory) -> Memory:
        return self.plus(other, 1.0)

    def plus(self, other: Memory, times: float) -> Memory:
        """With so many times the other; spelled out likewise."""
        return Memory(
            weights=self.weights + times * other.weights,
            grads=self.grads + times * other.grads,
            optimizer=self.optimizer + times * other.optimizer,
            activations=self.activations + times * other.activations,
            working=self.working + times * other.working,
            logits=self.logits + times * other.logits,
            buffers=self.buffers + times * other.buffers,
            fragments=self.fragments + times * other.fragments,
            runtime=self.runtime + times * other.runtime,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Overheads:
    """What an allocator and a runtime take beyond what was asked for; by device family."""

    runtime_bytes: float = 0.0
    fragments: float = 0.0
    """Part of all that comes and goes: activations, working memory, logits, and what lies beside
    them (``stage_beside``)."""
    again_bytes: float = 0.0
    """Of a runtime that computes something again."""


ARRIVING = 0.73
"""As ``Overheads.fragments``, where whole layers arrive in the middle of each pass of a processor:
they lie between others that are kept. Measured with level 3."""
CPU = Overheads(runtime_bytes=0.32 * 2**30, fragments=0.35, again_bytes=0.035 * 2**30)
"""PyTorch's checkpointing imports its compiler, whether it is used or not: 36.0 MiB of a process
that forks with it were measured with PyTorch 2.13; not of an accelerator."""
ACCELERATOR = Overheads(runtime_bytes=1.5 * 2**30, fragments=0.05)


@lru_cache(maxsize=1 << 14)
def stage_params(
    shape: ModelShape,
    layers: Layers,
    axes: Axes,
    widths: Widths = EVEN,
    *,
    embeds: bool,
    predicts: float,
) -> tuple[float, float]:
    """Parameters of one rank of a stage: those that every token uses, and experts.

    ``widths``: as of a ``StageWork``.
    """
    split, several = share(axes, "d_ff"), share(axes, "experts")
    attends, feeds = widths.heads(shape, share(axes, "heads")), widths.part
    many = shape.experts.num_experts if shape.experts else 1
    held = ceil(many / several) / many  # by the rank that has most
    dense = experts = 0.0
    for first, branch in _branches(layers, apart=attends != feeds):
        whole = shape.whole_attention_params if branch != "feed_forward" else 0
        part = (attends if branch == "attention" else feeds) / split
        dense += (shape.dense_params(first, branch) - whole) * part + whole
        if branch != "attention":
            experts += shape.expert_params(first) * held * part
    tables = shape.table_params * feeds / share(axes, "vocab")
    dense += (tables + shape.num_positions * shape.d_model) * embeds
    if predicts:
        dense += shape.norm_params + predicts * tables * (not (shape.tied and embeds))
    return dense, experts


def _branches(layers: Layers, *, apart: bool) -> Iterator[tuple[int, Branch | None]]:
    """Layers by number, and the one part of it that there is of each, or None; ``apart``: both
    parts of each one by one."""
    for first, end in in_parts(layers):
        if end - first == 1 and not apart:
            yield floor(first), None
            continue
        if first % 1 == 0:
            yield floor(first), "attention"
        if end % 1 == 0:
            yield floor(first), "feed_forward"


def params_of(shape: ModelShape, choice: StageChoice) -> tuple[float, float]:
    """``stage_params`` of what a rank computes."""
    work = choice.work
    ends = {"embeds": work.embeds, "predicts": work.predicts}
    dense, experts = stage_params(shape, work.layers, work.axes, work.widths, **ends)
    return dense, experts * work.expert_part


def trained_params(shape: ModelShape, choice: StageChoice) -> tuple[float, float]:
    """Likewise, as far as they are trained."""
    if choice.trained == ALL_PARTS:
        return params_of(shape, choice)
    embed, layers, head = choice.trained
    last = choice.holding((0, 0), embeds=choice.work.embeds, predicts=choice.work.predicts)
    first = choice.holding((0, 0), embeds=choice.work.embeds, predicts=False)
    embedded, ends = (params_of(shape, each)[0] for each in (first, last))
    whole, experts = params_of(shape, choice)
    inside = layers * (whole - ends)
    return inside + embed * embedded + head * (ends - embedded), layers * experts


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """One rank of one stage, in parts: what counts once, what is divided, what each adds."""

    whole: Memory
    """However many hold the same parameters, and with no microbatch held."""
    divided: Memory
    """Parameters' state that ranks divide among them."""
    part: float
    """What of it this rank keeps."""
    each: Memory
    """Of every microbatch whose forward results are kept."""
    waiting: Memory
    """Of every one whose weight gradients wait: what came back from the host for them."""
    border: Memory
    """Of every tensor at a border."""

    def holding(self, microbatches: float, borders: float = 0, waiting: float = 0) -> Memory:
        """At a peak of so many microbatches, beside so many tensors at borders and weight gradients
        that wait."""
        parts = self.whole.plus(self.divided, self.part).plus(self.each, microbatches)
        return parts.plus(self.border, borders).plus(self.waiting, waiting)


def stage_memory(
    shape: ModelShape, choice: StageChoice, overheads: Overheads | None = None
) -> StageMemory:
    """One rank of one stage; ``overheads``: None for those that are usual on its device."""
    work = choice.work
    overheads = overheads or (CPU if work.eager else ACCELERATOR)
    whole, divided = _state(shape, choice)
    kept, away, last = stage_kept(shape, work), stage_away(shape, work), logits(shape, work)
    working = stage_working(shape, work) - last
    comes = choice.zero == 3 or choice.brings_params
    gathered = gathered_layers(shape, choice, work) if comes else 0.0
    if choice.brings_params:
        # Gradients of one layer, until they are added, and a matrix's as it is.
        gathered *= 1 + choice.state.grad / choice.state.weight / 2
        gathered += choice.state.weight * shape.d_model * shape.d_ff / work.share("d_ff")
    beside = stage_beside(shape, work)
    arriving = work.eager and choice.zero == 3
    fragments = max(overheads.fragments, ARRIVING * arriving)
    return StageMemory(
        whole=Memory(
            **whole,
            working=working,
            logits=last,
            buffers=_buckets(shape, choice)
            + _terms(shape, choice)
            + gathered
            + _rooms(shape, choice)
            + _experts_here(shape, choice),
            fragments=fragments * (working + last + beside) + beside,
            runtime=overheads.runtime_bytes + overheads.again_bytes * _checkpoints(work),
        ),
        divided=divided,
        part=choice.kept,
        each=Memory(activations=kept, fragments=fragments * kept),
        waiting=Memory(working=away, fragments=fragments * away),
        border=Memory(buffers=work.wide * work.rows * shape.d_model),
    )


def _checkpoints(work: StageWork) -> bool:
    """Something is computed again."""
    modes = (name for names, _ in work.recompute for name in names)
    return any(MODES[name].waits == "device" for name in modes)


def _state(shape: ModelShape, choice: StageChoice) -> tuple[dict[str, float], Memory]:
    """Bytes of parameters at rest: those that every holder keeps, and those that are divided.

    Frozen ones have weights alone, which nobody divides. Fewer ranks hold the same experts, so that
    what they divide counts as more; but for those of which there are copies.
    """
    dense, experts = trained_params(shape, choice)
    if choice.brings_experts:
        experts = 0.0
    frozen = sum(params_of(shape, choice)) - sum(trained_params(shape, choice))
    fewer = choice.ways / max(choice.ways // choice.work.share("experts"), 1)
    fewer *= choice.work.expert_kept / choice.work.expert_part
    state = {
        "weights": (choice.state.weight, "weight"),
        "grads": (choice.state.grad, "grad"),
        "optimizer": (choice.state.optimizer, "optimizer"),
    }
    if choice.keeps_apart:
        del state["optimizer"]
    if choice.keeps_grads_apart:
        del state["grads"]
    if choice.brings_params:
        state["weights"] = 0.0, "weight"
    whole, divided = {}, {}
    for name, (each, part) in state.items():
        divides = choice.zero >= SHARED_FROM[part]
        whole[name] = 0.0 if divides else each * (dense + experts)
        divided[name] = each * (dense + experts * fewer) if divides else 0.0
    whole["weights"] += choice.state.weight * frozen
    if choice.work.eager and choice.zero == 1:  # its own segment of the sums, beside all gradients
        divided["grads"] += choice.state.grad * dense
    return whole, Memory(**divided)


def _buckets(shape: ModelShape, choice: StageChoice) -> float:
    """Two on their way. On a processor they are summed where they are; from level 2 on there are
    three of the program's with what comes of them, some of them while the next microbatch computes
    already, beside what the library has."""
    if choice.num_holders == 1:
        return 0.0
    if not choice.work.eager:
        return 2 * BUCKET_BYTES
    if choice.zero < SHARED_FROM["grad"]:
        return 0.0
    dense, experts = trained_params(shape, choice)
    own = _largest_unit(shape, choice.work) if choice.zero == 3 else dense + experts
    largest = min(BUCKET_BYTES, choice.state.grad * own)
    return LIBRARY_BYTES + min(3 * largest, choice.state.grad * own) * 1.5


def _rooms(shape: ModelShape, choice: StageChoice) -> float:
    """Pieces of what only updates need, where that is kept apart: one computes, while the next one
    arrives and the last one leaves."""
    if not choice.keeps_apart:
        return 0.0
    params = sum(trained_params(shape, choice)) * choice.kept
    piece, each = float(PIECE_BYTES), choice.state.optimizer
    each += choice.state.grad * choice.keeps_grads_apart
    if not choice.by_element:
        work = choice.work
        tables = shape.table_params / work.share("vocab") * (work.embeds or work.predicts)
        matrix = shape.d_model * shape.d_ff / work.share("d_ff")
        piece = max(piece, each * choice.kept * max(tables, matrix))
    return min(NUM_ROOMS * piece, each * params)


def _experts_here(shape: ModelShape, choice: StageChoice) -> float:
    """Of experts that are kept elsewhere: those of some layers, the gradients of one on their way,
    twice, and pieces of what updates need."""
    if not choice.brings_experts:
        return 0.0
    _, experts = params_of(shape, choice)
    layer = experts / max(choice.work.num_layers, 1)
    layers = min(choice.expert_layers, choice.work.num_layers)
    whole = choice.state.weight * layers + choice.state.grad * 2
    share = choice.state.weight + choice.state.grad + choice.state.optimizer
    rooms = 0.0 if choice.keeps_apart else min(float(NUM_ROOMS * PIECE_BYTES), share * experts)
    return layer * whole + rooms


def experts_apart(shape: ModelShape, choice: StageChoice) -> float:
    """Bytes of a stage's experts, as they compute, gradients and state, that one rank keeps where
    they are kept elsewhere: those that hold the same have a part each."""
    _, experts = trained_params(shape, choice)
    state = choice.state
    return experts * (state.weight + state.grad + state.optimizer) / choice.expert_holders


def experts_elsewhere(
    plan: Plan, spec: ModelSpec, seq_len: int, training: Training, tier: Tier
) -> dict[int, float]:
    """By rank, bytes of experts that it keeps in a tier: as they compute, gradients and state."""
    found: dict[int, float] = {}
    shape = shape_of(spec)
    for p, s, stage in plan.stages():
        if stage.expert_tier != tier or not keeps_apart(tier, stage.device):
            continue
        each = experts_apart(shape, choice_of(plan.pipelines[p], s, seq_len, training=training))
        for rank in stage.mesh.ranks:
            found[rank] = found.get(rank, 0.0) + each
    return found


def _terms(shape: ModelShape, choice: StageChoice) -> float:
    """Of an unlike segment, what came from each of those that share, until it is summed: at level 1
    of all gradients at once, above of a few buckets."""
    if choice.part is None:
        return 0.0
    grads = choice.state.grad * sum(trained_params(shape, choice))
    on_their_way = grads if choice.zero == 1 or choice.pipelines > 1 else 3 * BUCKET_BYTES
    return choice.ways * choice.part * min(grads, on_their_way)


def gathered_layers(shape: ModelShape, choice: StageChoice, work: StageWork) -> float:
    """Bytes that level 3 holds whole: the layer that computes and the next one."""
    return choice.state.weight * _largest_unit(shape, work, layers=2)


def _largest_unit(shape: ModelShape, work: StageWork, *, layers: int = 1) -> float:
    """Parameters of so many layers, or of a table where that has more."""
    held = work.layers, work.axes, work.widths
    dense, experts = stage_params(shape, *held, embeds=False, predicts=False)
    inside = layers * (dense + experts * work.expert_part) / max(work.num_layers, 1)
    table = shape.table_params / work.share("vocab") * max(work.embeds, work.predicts)
    return max(inside, table)


def memory_of_plan(
    plan: Plan,
    spec: ModelSpec,
    seq_len: int,
    overheads: Mapping[str, Overheads] = MappingProxyType({}),
    training: Training = ALL_BY_ADAMW,
) -> dict[int, Memory]:
    """Rank -> memory, for every rank of a plan; every stage on its own terms.

    ``overheads``: by device family, where they were measured.
    """
    found_for = ways_of_domains(plan), state_parts(plan)
    asked = _Asked(plan, shape_of(spec), seq_len, overheads, training, *found_for)
    result: dict[int, Memory] = {}
    for p, pipeline in enumerate(plan.pipelines):
        counts = zip(
            pipeline.positions(),
            held_at_peak(Pattern.of(pipeline)),
            asked.at_borders(pipeline),
            asked.waiting(pipeline),
            strict=True,
        )
        for stages, held, borders, waiting in counts:
            for ranks in asked.alike(p, stages):
                parts = [
                    part.holding(n * passes, borders * passes, w * passes)
                    for (part, passes), n, w in zip(
                        asked.parts(p, stages, ranks[0]), held, waiting, strict=True
                    )
                ]
                whole = asked.in_one_backward(p, stages, ranks[0], taking_turns(parts))
                result |= dict.fromkeys(ranks, whole)
    return _forked_alike(plan, result)


def _forked_alike(plan: Plan, found: dict[int, Memory]) -> dict[int, Memory]:
    """Ranks of a machine fork from one process, which imports what any of them needs: where only
    some of its processors compute again, all have as much of a runtime as these."""
    stages = [stage for _, _, stage in plan.stages() if stage.device == HOST]
    if len({stage.recompute == "off" for stage in stages}) < 2:
        return found
    ranks = {rank for stage in stages for rank in stage.mesh.ranks}
    most = max(found[rank].runtime for rank in ranks)
    return found | {rank: replace(found[rank], runtime=most) for rank in ranks}


def room_of_plan(
    plan: Plan,
    spec: ModelSpec,
    seq_len: int,
    limits: Sequence[float],
    overheads: Mapping[str, Overheads] = MappingProxyType({}),
    training: Training = ALL_BY_ADAMW,
) -> list[tuple[int, ...]]:
    """By pipeline and position, microbatches of its stages at most that fit on each of its ranks,
    all of the stage that keeps most of them. Never more than a step has.

    ``limits``: bytes, by rank.
    """
    found_for = ways_of_domains(plan), state_parts(plan)
    asked = _Asked(plan, shape_of(spec), seq_len, overheads, training, *found_for)
    room = []
    for p, pipeline in enumerate(plan.pipelines):
        many, found = pipeline.num_microbatches, []
        held_by = held_at_peak(Pattern.of(pipeline))
        counts = zip(held_by, asked.at_borders(pipeline), strict=True)
        for stages, (held, borders) in zip(pipeline.positions(), counts, strict=True):
            parts = [(asked.parts(p, stages, a[0]), a[0]) for a in asked.alike(p, stages)]
            ahead = max(borders - sum(held), 0)
            found.append(min(_room(each, limits[rank], many, ahead) for each, rank in parts))
        room.append(tuple(found))
    return room


def _room(parts: Sequence[tuple[StageMemory, int]], limit: float, many: int, ahead: float) -> int:
    """Each microbatch keeps its result too; ``ahead``: what else there is at borders."""
    left = limit - taking_turns([part.holding(0, ahead * n) for part, n in parts]).total
    most = max((part.each.total + part.border.total) * passes for part, passes in parts)
    enough = many * len(parts)
    return enough if most * enough <= left else max(int(left // most), 0)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A plan, and what its memory depends on besides."""

    plan: Plan
    shape: ModelShape
    seq_len: int
    overheads: Mapping[str, Overheads]
    training: Training
    ways: Mapping[tuple[int, int], int]
    unlike: Mapping[tuple[int, int], Mapping[int, float]]

    def at_borders(self, pipeline: PipelinePlan) -> tuple[float, ...]:
        """Of each position."""
        return borders_at_peak(Pattern.of(pipeline), message_part(pipeline, self.shape.d_model))

    def waiting(self, pipeline: PipelinePlan) -> Sequence[Sequence[int]]:
        """By position, of how many microbatches of its stages the weight gradients wait, where that
        matters."""
        if any(offloads(stage.recompute) for stage in pipeline.stages):
            return waiting_at_peak(Pattern.of(pipeline))
        return [(0,) * len(stages) for stages in pipeline.positions()]

    def alike(self, number: int, stages: Sequence[int]) -> list[tuple[int, ...]]:
        """Ranks of a pipeline's stages that share them, together where they compute and keep as
        much as one another."""
        asked = [self.plan.pipelines[number].stages[stage] for stage in stages]
        ranks = asked[0].mesh.ranks
        said = any(stage.is_unlike for stage in asked)
        if not said and not any((number, stage) in self.unlike for stage in stages):
            return [ranks]
        return [(rank,) for rank in ranks]

    def parts(self, number: int, stages: Sequence[int], rank: int) -> list[tuple[StageMemory, int]]:
        """Of a pipeline's stages that share ranks: the memory of each on one, and its passes."""
        found = []
        for stage in stages:
            choice = self._choice(number, stage, rank)
            own = self.overheads.get(self.plan.pipelines[number].stages[stage].device)
            found.append((stage_memory(self.shape, choice, own), choice.passes))
        return found

    def in_one_backward(
        self, number: int, stages: Sequence[int], rank: int, whole: Memory
    ) -> Memory:
        """Of a step's only microbatch: gradients come as what was kept for them goes, where they
        stay where they come. Those of the step before are gone by then."""
        if self.plan.pipelines[number].num_microbatches > 1 or len(stages) > 1:
            return whole
        choice, shape = self._choice(number, stages[0], rank), self.shape
        work = choice.work
        if choice.passes > 1 or _in_buckets(choice):
            return whole
        comes_last = work.embeds and not (shape.tied and work.predicts)
        tables = choice.state.grad * shape.table_params / work.share("vocab") * comes_last
        working = stage_working(shape, work._replace(predicts=0.0))
        end = replace(whole, activations=0.0, logits=0.0, working=0.0)
        last_layer = replace(
            end,
            grads=max(end.grads - tables, 0.0),
            activations=whole.activations / max(work.num_layers, 1),
            working=working,
        )
        return max((replace(whole, grads=0.0), last_layer, end), key=lambda each: each.total)

    def _choice(self, number: int, stage: int, rank: int) -> StageChoice:
        place = number, stage
        return choice_of(
            self.plan.pipelines[number],
            stage,
            self.seq_len,
            len(self.plan.pipelines),
            self.training,
            self.ways[place],
            rank=rank,
            part=self.unlike.get(place, {}).get(rank),
        )


def _in_buckets(choice: StageChoice) -> bool:
    """Gradients do not stay where autograd makes them."""
    is_apart = choice.keeps_grads_apart or choice.brings_params or choice.brings_experts
    is_shared = choice.num_holders > 1 or choice.zero > 0 or choice.part is not None
    return is_apart or is_shared or choice.state.grad != choice.state.weight


def fullest(stage: StagePlan, memory: Mapping[int, Memory], room: Callable[[int], float]) -> int:
    """Of a stage's ranks the one whose memory takes the largest part of what it has ``room`` for;
    the first of those alike."""
    if not (stage.is_unlike or stage.state_shares):
        return stage.mesh.ranks[0]
    return max(stage.mesh.ranks, key=lambda rank: memory[rank].total / room(rank))


def taking_turns(parts: Sequence[Memory]) -> Memory:
    """Stages of one rank: they take turns at working memory and share the runtime."""
    total = sum(parts[1:], parts[0])
    working, buffers = max(part.working for part in parts), max(part.buffers for part in parts)
    runtime = max(part.runtime for part in parts)
    return replace(total, working=working, buffers=buffers, runtime=runtime)

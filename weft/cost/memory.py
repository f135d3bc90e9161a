"""Memory of every rank, by category: parameters at rest, what microbatches keep, what work needs.

``stage_memory`` is a function of numbers alone and answers for one rank of one stage; searches call
it thousands of times a second. ``memory_of_plan`` asks it for every position of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from weft.cost.activations import logits, stage_kept, stage_working
from weft.cost.work import SHARED_FROM, STATES, StageWork, StateBytes
from weft.models.registry import shape_of
from weft.models.shape import ModelShape
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan
from weft.schedules.known import Pattern, held_at_peak

BUCKET_BYTES = 8 << 20
"""Of one bucket of gradients; one is filled while one is on its way."""


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
    """Of collectives and seams."""
    fragments: float = 0.0
    """Free, but in pieces that nobody can use."""
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

    def __add__(self, other: Memory) -> Memory:
        mine, theirs = self.by_category(), other.by_category()
        return Memory(**{name: mine[name] + theirs[name] for name in mine})


@dataclass(frozen=True, kw_only=True, slots=True)
class Overheads:
    """What an allocator and a runtime take beyond what was asked for; by device family."""

    runtime_bytes: float = 0.0
    fragments: float = 0.0
    """Part of all that comes and goes: activations, working memory and logits."""


ARRIVING = 0.4
"""As ``Overheads.fragments``, where tensors arrive in the middle of each pass of a processor: they
lie between others that are kept. Measured with tensor parallelism and with level 3."""
CPU = Overheads(runtime_bytes=0.32 * 2**30, fragments=0.33)
ACCELERATOR = Overheads(runtime_bytes=1.5 * 2**30, fragments=0.05)


@lru_cache(maxsize=1 << 14)
def stage_params(shape: ModelShape, work: StageWork) -> tuple[float, float]:
    """Parameters of one rank of a stage: those that every token uses, and experts."""
    first, end = work.layers
    dense = sum(shape.dense_params(layer) for layer in range(first, end)) / work.tp
    experts = sum(shape.expert_params(layer) for layer in range(first, end)) / (work.tp * work.ep)
    tables = shape.table_params / work.tp
    dense += (tables + shape.num_positions * shape.d_model) * work.embeds
    if work.predicts:
        dense += shape.norm_params + tables * (not (shape.tied and work.embeds))
    return dense, experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """How ranks that hold the same parameters keep them."""

    zero: int
    num_holders: int
    """Ranks with the same parameters: data-parallel and context-parallel together."""
    ways: int = 0
    """Of these, how many share among them; 0 is all."""
    gathered: float = 0.0
    """Bytes of parameters that level 3 has whole at one moment: two layers."""


def stage_memory(
    shape: ModelShape,
    work: StageWork,
    *,
    held: float,
    state: StateBytes,
    sharing: Sharing,
    overheads: Overheads,
) -> Memory:
    """One rank of one stage.

    ``held``: microbatches whose forward results are kept at the peak, of this stage.
    """
    dense, experts = stage_params(shape, work)
    parts = {}
    for part, level in SHARED_FROM.items():
        ways = (sharing.ways or sharing.num_holders) if sharing.zero >= level else 1
        expert_ways = max(ways // work.ep, 1)
        each = {"weight": state.weight, "grad": state.grad, "optimizer": state.optimizer}[part]
        parts[part] = each * (dense / ways + experts / expert_ways)
    kept = stage_kept(shape, work)
    working = max(stage_working(shape, work) - logits(shape, work), 0.0)
    if work.eager:  # the head's gradients are there while the layers' backward computes
        working = stage_working(shape, replace(work, predicts=False))
    if work.eager and sharing.zero == 1:  # its own segment of the sums, beside all gradients
        parts["grad"] += state.grad * dense / (sharing.ways or sharing.num_holders)
    seams = 2 * work.wide * work.tokens * shape.d_model / (work.tp if work.sequence_parallel else 1)
    moving = held * kept + working + logits(shape, work)
    arriving = ARRIVING * (work.eager and (work.tp > 1 or sharing.zero == 3))
    return Memory(
        weights=parts["weight"],
        grads=parts["grad"],
        optimizer=parts["optimizer"],
        activations=held * kept,
        working=working,
        logits=logits(shape, work),
        buffers=seams + _buckets(work, sharing) + sharing.gathered,
        fragments=(overheads.fragments + arriving) * moving,
        runtime=overheads.runtime_bytes,
    )


def _buckets(work: StageWork, sharing: Sharing) -> float:
    """Two on their way; on a processor from level 2 on with what came, and one more."""
    many = 5 if work.eager and sharing.zero >= 2 else 2
    return many * BUCKET_BYTES * (sharing.num_holders > 1)


def gathered_layers(shape: ModelShape, work: StageWork, weight_bytes: float) -> float:
    """Bytes that level 3 holds whole: the layer that computes and the next one."""
    dense, experts = stage_params(shape, replace(work, embeds=False, predicts=False))
    layers = 2 * (dense + experts) / max(work.num_layers, 1)
    table = shape.table_params / work.tp * (work.embeds or work.predicts)
    return weight_bytes * max(layers, table)


def work_of(pipeline: PipelinePlan, number: int, seq_len: int) -> StageWork:
    """What one rank of a planned stage does: that with the most samples."""
    stage = pipeline.stages[number]
    mesh = stage.mesh
    samples = -(-pipeline.microbatch // mesh.size("dp"))
    return StageWork(
        layers=stage.layers,
        embeds=number == 0,
        predicts=number == len(pipeline.stages) - 1,
        samples=-(-samples // stage.passes),
        seq_len=seq_len,
        tp=mesh.size("tp"),
        cp=mesh.size("cp"),
        sequence_parallel=True,
        recompute="full" if stage.recompute == "full" else "off",
        dtype="bf16" if stage.precision == "bf16" else "fp32",
        eager=stage.device == "cpu",
    )


def held_by_stage(pipeline: PipelinePlan) -> tuple[tuple[int, ...], ...]:
    """For every position, how many microbatches each of its stages holds at the position's peak.

    From the schedule's own lists, after the proof that they end.
    """
    return held_at_peak(Pattern.of(pipeline))


def memory_of_plan(
    plan: Plan,
    spec: ModelSpec,
    seq_len: int,
    overheads: Mapping[str, Overheads] = MappingProxyType({}),
) -> dict[int, Memory]:
    """Rank -> memory, for every rank of a plan; every stage on its own terms.

    ``overheads``: by device family, where they were measured.
    """
    shape = shape_of(spec)
    result: dict[int, Memory] = {}
    for pipeline in plan.pipelines:
        counts = held_by_stage(pipeline)
        for stages, held in zip(pipeline.positions(), counts, strict=True):
            asked = _Asked(
                shape=shape,
                seq_len=seq_len,
                num_pipelines=len(plan.pipelines),
                overheads=overheads,
            )
            parts = [
                _planned(pipeline, number, count, asked)
                for number, count in zip(stages, held, strict=True)
            ]
            whole = taking_turns(parts)
            result |= dict.fromkeys(pipeline.stages[stages[0]].mesh.ranks, whole)
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """The same for all stages of a plan."""

    shape: ModelShape
    seq_len: int
    num_pipelines: int
    overheads: Mapping[str, Overheads]


def _planned(pipeline: PipelinePlan, number: int, held: int, asked: _Asked) -> Memory:
    stage = pipeline.stages[number]
    work = work_of(pipeline, number, asked.seq_len)
    state = STATES[stage.precision]
    holders = stage.mesh.size("dp") * stage.mesh.size("cp")
    gathered = gathered_layers(asked.shape, work, state.weight) if stage.zero == 3 else 0.0
    if stage.zero < 3:  # pipelines side by side hold the same parameters
        holders *= asked.num_pipelines
    return stage_memory(
        asked.shape,
        work,
        held=held * stage.passes,
        state=state,
        sharing=Sharing(zero=stage.zero, num_holders=holders, gathered=gathered),
        overheads=asked.overheads.get(stage.device, CPU if stage.device == "cpu" else ACCELERATOR),
    )


def taking_turns(parts: Sequence[Memory]) -> Memory:
    """Stages of one rank: they take turns at working memory and share the runtime."""
    total = sum(parts[1:], parts[0])
    working, buffers = max(part.working for part in parts), max(part.buffers for part in parts)
    return replace(total, working=working, buffers=buffers, runtime=parts[0].runtime)

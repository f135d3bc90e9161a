"""The sections under ``plan``: how a person divides a job among processes."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, create_model, model_validator

from weft.config.axes import ENTRIES, NAMES, ORDER_MANUAL, UNLIKE
from weft.config.errors import ConfigError
from weft.config.open_fields import OneOf
from weft.config.values import Count, Flag, Layers, Section, Text, Whole

Device = Annotated[str, OneOf("devices", "auto")]
Precision = Annotated[str, OneOf("precisions", "auto")]
Recompute = Annotated[str, OneOf("recompute", joins=True)]
MADE = "made"
"""The order is made for the stages, as ``weft.resolve.orders`` does it."""
Schedule = Annotated[str, OneOf("schedules", MADE)]
Domains = Literal["nodes", "pipelines", "families"]
Between = Literal["nodes", "families"]
Cast = Literal["bf16", "fp8"]


Shares = Annotated[tuple[Whole, ...], Field(min_length=1)]


class _StageLayers(Section):
    """What a stage holds."""

    layers: Layers | None = None
    """Layers it holds; null takes an even part of what the other stages of the pipeline leave. The
    first stage also has the embedding, the last the head; a stage without layers is allowed. 2.5
    ends inside the third one, after its attention; the next stage begins with its feed-forward."""
    split: tuple[Layers, ...] | None = None
    """Instead of `layers`, where the schedule gives each mesh several stages: the layers of each of
    them, in the order of the model. null splits `layers` evenly."""


if TYPE_CHECKING:
    _StageMesh = _StageLayers
else:  # a key for each axis of the table, and one for their order
    _StageMesh = create_model(
        "_StageMesh",
        __base__=_StageLayers,
        **{entry.name: (Count, Field(1, description=entry.manual)) for entry in ENTRIES},
        order=(
            Annotated[tuple[Literal[NAMES], ...], Field(min_length=1)] | None,
            Field(None, description=ORDER_MANUAL),
        ),
    )


class StageConfig(_StageMesh):
    """Consecutive layers of a pipeline on ranks of their own, as many as the product of the sizes
    of their axes, and how they compute. What is left out, or null, is as in `compute`."""

    zero: Annotated[Whole, Field(le=3)] = 0
    """What ranks with the same parameters divide instead of each keeping all of it: 1 the
    optimizer's state, 2 gradients too, 3 the parameters too; 0 nothing."""
    passes: Count = 1
    """Parts that each rank cuts its samples of a micro-batch into, computed one after another."""
    pieces: Count = 1
    """Pieces of what `tp` ranks gather and sum inside layers, cut along the sequence: one is on its
    way while the products of another are computed."""
    head_ways: Count = 1
    """How many neighbouring ranks that divide tokens divide heads in attention instead: all to all
    there and back (DeepSpeed Ulysses, segment parallel). All of them, or fewer, as those of one
    machine: among such groups keys and values travel as with 1 (two dimensions)."""
    scores: Literal["blocks", "rows"] = "blocks"
    """How ranks that divide tokens attend to one another's: in blocks of scores that are forgotten
    (ring attention, or kernels), or in rows of all of them, for which keys go round and then values
    (ring self-attention of the first sequence parallelism; memory grows with the square of the
    length)."""
    expert_ways: Whole = 0
    """How many neighbouring ranks that divide experts exchange tokens among themselves first, and
    then send each such group one message: fewer and longer ones go far. 0: those of one machine,
    where the ranks are on several; 1: each sends to all at once."""
    expert_pieces: Count = 1
    """Pieces of each rank's tokens on their way to experts of other ranks and back: experts compute
    one while others travel. One that every token visits is computed meanwhile too, also with 1."""
    expert_shares: Shares | None = None
    """How many of a layer's experts each place along `ep` has, as weights: [3, 1] gives a chip that
    is three times as fast three times as many. null: as even as they go."""
    width_shares: Shares | None = None
    """What part of the heads, hidden channels and vocabulary each place along `tp` has, as weights:
    [3, 1] gives a chip that is three times as fast three times as many. null: as even as they
    go."""
    expert_cast: Cast | None = None
    """Tokens on their way to experts of other ranks and back, and their gradients, are cast to
    this: fewer bytes, and rounded, so numbers depend on it. null: they travel as they are."""
    expert_cast_between: Literal["nodes"] | None = None
    """Only in exchanges among processes on several nodes. null: in all."""
    sample_shares: Shares | None = None
    """What part of the samples of a micro-batch is computed at each place along `dp`, as weights:
    [3, 1] gives the first three times as much, 0 nothing. null: alike."""
    state_shares: Shares | None = None
    """What part of what `zero` divides each process of the stage keeps, as weights in the order of
    its ranks: [1, 7] where the second has more memory, 0 for nothing. null: alike."""
    device: Device | None = None
    """Chips of this stage."""
    precision: Precision | None = None
    """Arithmetic of this stage."""
    recompute: Recompute | None = None
    """What this stage computes again in backward (activation checkpointing), as in `compute`."""
    compile: Flag | None = None
    """torch.compile each block of this stage."""
    state_tier: Literal["device", "host", "disk"] | None = None
    """Where this stage keeps what only updates need; null is `optim.state_tier`."""
    param_tier: Literal["device", "host", "disk"] | None = None
    """Where this stage keeps its parameters; null is `optim.param_tier`."""
    expert_tier: Literal["device", "host", "disk"] | None = None
    """Where this stage keeps its experts; null is `optim.expert_tier`."""
    expert_layers: Count | None = None
    """Layers whose experts it has on its devices at a time; null is `optim.expert_layers`."""

    @property
    def axes(self) -> dict[str, int]:
        """Size of each axis of its mesh, outermost first."""
        said = dict(self)
        return {name: said[name] for name in dict.fromkeys([*(said["order"] or ()), *NAMES])}

    @property
    def shares(self) -> dict[str, tuple[int, ...]]:
        """By axis, weights of the unlike parts of its places, where it has any."""
        said = dict(self)
        return {entry.name: said[entry.shares_key] or () for entry in UNLIKE}

    @property
    def num_ranks(self) -> int:
        """Of its mesh."""
        return prod(self.axes.values())


InFlight = Annotated[tuple[Count, ...], Field(min_length=1)]
Stages = Annotated[tuple[StageConfig, ...], Field(min_length=1)]


class PipelineConfig(Section):
    """A whole copy of the model cut into stages, and its part of every batch."""

    share: Whole = 1
    """Part of every batch that it takes, as a number of `plan.shares` does. 0: it computes nothing,
    and keeps and updates what `zero` gives it, as a host with much memory can for small cards."""
    micro: Count | None = None
    """Samples of one of its micro-batches, the last of a step may have less; null is
    `batch.micro`."""
    schedule: Schedule | None = None
    """Order of its forwards and backwards; null is `plan.schedule`."""
    chunks: Count | None = None
    """Stages on each of its meshes; null is `plan.chunks`."""
    in_flight: InFlight | None = None
    """Micro-batches under way on each of its meshes, as in `plan.in_flight`."""
    head: Shares | None = None
    """What part of the head's rows each of its meshes has, as in `plan.head`."""
    stages: Stages
    """Its stages, as in `plan.stages`."""


class AutoConfig(Section):
    """The planner divides the job so that a step takes least time; `plan: auto` is all of it by
    default. Micro-batches, schedules, recomputation and which processes hold what are its to
    choose; what `batch.micro`, `plan.schedule` and `compute` say is kept to."""

    cluster: Text | None = None
    """File that says what chips the processes of another launcher run on; null asks them. `weft
    lab` gives its own."""
    ranks: Count | None = None
    """Processes to divide the job among; null is up to one for each GPU, or for each core where
    there is none, and fewer where that is faster."""
    max_stages: Count | None = None
    """Most stages of a pipeline: 1 for none but data and tensor parallelism; null is as many as are
    fastest."""
    domains: bool = True
    """Let it also choose domains: what several nodes or pipelines hold in common is then summed
    inside each and between them, where that is faster. On up to 32 chips every plan is looked at
    with them and without, on more the best few are priced with them."""


class PlanConfig(Section):
    """How the job is divided among processes: at most one of `auto`, `file`, `shares`, `stages` and
    `pipelines`. One that is given replaces whatever a recipe or file below it said of the plan."""

    auto: AutoConfig | None = None
    """Let the planner choose; `plan: auto` for short. It also replaces `batch.micro` and
    `batch.accumulation` of a recipe or file below it."""
    file: Text | None = None
    """A plan.json to run as it is."""
    shares: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    """One process for each number, and the part of every batch that it takes: [2, 1] gives the
    first process twice as much as the second. null: one process, or an equal share for each that
    another launcher started."""
    stages: Stages | None = None
    """One pipeline: its stages in order. Ranks are given out in the same order, from 0."""
    pipelines: Annotated[tuple[PipelineConfig, ...], Field(min_length=1)] | None = None
    """Several pipelines side by side, equal or not."""
    schedule: Schedule | None = None
    """Order in which a pipeline of several stages does forwards and backwards; null is "1f1b", and
    with `auto` whichever is fastest. "made" makes it for what these stages and borders are
    predicted to take, in the memory there is: a named one, with more micro-batches in
    flight, or a list, whichever is fastest. With `auto` it is what null is."""
    chunks: Count | None = None
    """Stages on each mesh with the schedule "interleaved"; null is 2. "zb-v" and "dualpipe-v"
    always have 2, a first and a last one, and the others 1. "made" has 1 where this is null, and
    lays 2 as either of them does, whichever is faster."""
    in_flight: InFlight | None = None
    """With `stages` and the schedule "1f1b": micro-batches whose forward is begun and whose
    backward is not done, on each mesh at most, first to last. More before a slow border hide its
    time and take memory. null: [3, 2, 1] for three, as many as borders of no length need; with
    `auto` as many as are fastest."""
    head: Shares | None = None
    """With `stages`: what part of the rows of the head each mesh has, as weights: [1, 0, 2] gives
    the last two thirds of the vocabulary, the middle one nothing. All compute their parts at once,
    so that the head is no more than a mesh can do. Not where the head is the embedding's table.
    null: the last stage has all."""
    domains: Domains | None = None
    """Sets of processes that fast links join: those of one node, of one pipeline, or on one family
    of chips. What several sets hold in common is summed inside each and then between them, so that
    slow links carry less; what `zero` divides is divided inside each. null: all are one set."""
    sums: Cast | None = None
    """What these sets send each other to sum gradients is cast to this: fewer bytes, and rounded,
    so numbers depend on the sets. Added in the dtype as before. null: it travels as it is."""
    reduction: Cast | None = None
    """What processes of one such set send each other to sum gradients is cast to this, as `sums` is
    between sets: fp8 has a scale for each 128 elements, a quarter of fp32's bytes, added in the
    dtype as before. null: it travels as it is."""
    reduction_between: Literal["nodes"] | None = None
    """Only where those who sum are on several nodes. null: everywhere."""
    gather: Literal["fp8"] | None = None
    """Weights that products in eight bits alone read (precision fp8 and fp8-blockwise) are rounded
    before `zero` gathers them, not after: half the bytes, and the same numbers bit for bit. null:
    they are gathered as they are."""
    gather_between: Literal["nodes"] | None = None
    """Only where those who gather are on several nodes. null: everywhere."""
    border: Cast | None = None
    """What processes of one stage send to those of the next is cast to this, activations and their
    gradients: fewer bytes, and rounded once more, so numbers depend on where stages end. null: it
    travels as it was computed."""
    border_between: Between | None = None
    """Cast only where the two stages are on several nodes, or on unlike families of chips. null:
    every border."""
    expert_imbalance: Annotated[float, Field(strict=True, ge=1)] = 1.0
    """Tokens of the most visited expert of a layer over the mean, as far as it is expected:
    `expert_imbalance` in `metrics.jsonl` tells it of an earlier run. Predictions, and a planner,
    wait for the rank that has that one; no number depends on it."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        given = [name for name in PLAN_WAYS if dict(self)[name] is not None]
        if len(given) > 1:
            first, second = (f"plan.{name}" for name in given[:2])
            written = self.model_dump(exclude_unset=True)[given[1]]
            expected = f"null when {first} is given"
            raise ConfigError(second, written, expected, "Remove one of the two.")
        if self.auto is not None and self.chunks is not None:
            raise ConfigError("plan.chunks", self.chunks, "null with plan.auto", "It chooses them.")
        for way, hint in (("auto", "It chooses them."), ("file", "The file says them.")):
            keys = ("domains", "in_flight", "head") if way == "auto" else FILE_SAYS
            for key in keys:
                if dict(self)[key] is not None and dict(self)[way] is not None:
                    raise ConfigError(f"plan.{key}", dict(self)[key], f"null with plan.{way}", hint)
        return self

    @model_validator(mode="after")
    def _not_alone(self) -> Self:
        if self.border_between is not None and self.border is None:
            expected = "null without plan.border"
            raise ConfigError("plan.border_between", self.border_between, expected)
        if self.sums is not None and self.domains is None:
            hint = "It is what they send each other."
            raise ConfigError("plan.sums", self.sums, "null without plan.domains", hint)
        if self.file is not None and self.schedule == MADE:
            raise ConfigError("plan.schedule", MADE, "null with plan.file", "The file says it.")
        for key in ("in_flight", "head"):
            value = dict(self)[key]
            if value is not None and self.stages is None:
                hint = "Each of plan.pipelines has its own." if self.pipelines is not None else ""
                raise ConfigError(f"plan.{key}", value, "null without plan.stages", hint)
        return self

    @model_validator(mode="after")
    def _casts_of_a_plan(self) -> Self:
        for key in ("gather", "reduction"):
            value, between = dict(self)[key], dict(self)[f"{key}_between"]
            if between is not None and value is None:
                expected = f"null without plan.{key}"
                raise ConfigError(f"plan.{key}_between", between, expected)
            if value is not None and self.auto is not None:
                hint = f'Stages of a plan that `weft plan --out` writes may have "{key}": "fp8".'
                raise ConfigError(f"plan.{key}", value, "null with plan.auto", hint)
        return self

    @property
    def batch_shares(self) -> tuple[int, ...] | None:
        """The part of every batch that each pipeline takes; None where nothing says it here."""
        if self.pipelines is not None:
            return tuple(pipeline.share for pipeline in self.pipelines)
        return (1,) if self.stages is not None else self.shares


FILE_SAYS = ("domains", "in_flight", "head", "border", "reduction", "gather")
PLAN_WAYS = ("auto", "file", "shares", "stages", "pipelines")
"""Keys of `PlanConfig` that exclude each other."""

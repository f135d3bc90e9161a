"""From a plan and a source of stages to live objects: the one place that puts a rank together.

A source says what is trained: a model family, a list of layers, somebody's module, stages that
only take time. ``assemble`` makes of it this rank's stages, its gradient path, the executor of its
schedule and the engine of its steps, the same way for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.config.errors import ConfigError
from weft.memory.parcels import ToHost, Ways
from weft.memory.residents import Residents
from weft.memory.spool import ToDisk
from weft.nn.init import initial_values
from weft.nn.losses import LinearCrossEntropy
from weft.nn.offloaded import offload
from weft.nn.recomputed import recompute
from weft.nn.stage import Buffer, InParts, MicroBatch, Objective, Stage, Unit
from weft.optim.optimizer import Optimizer
from weft.outer.meeting import Meeting
from weft.parallel.apply import axis_groups
from weft.parallel.buckets import BUCKET_BYTES
from weft.parallel.fp8.apply import EightBits, eight_bits
from weft.parallel.fp8.gathered import refuse_other_uses
from weft.parallel.fp8.history import Histories, histories_of
from weft.parallel.gradients import Gradients
from weft.parallel.params import Held, LocalParam, held_pieces, stages_with
from weft.parallel.pipeline.deferred import WeightWork, defer_linears
from weft.parallel.pipeline.executor import Computation, Executor
from weft.parallel.pipeline.passes import InPasses, objective_in_passes
from weft.parallel.pipeline.running import RunningBuffers
from weft.parallel.pipeline.stage_border import channels, edges
from weft.parallel.sharding import UnitParams, gather_in_time
from weft.plan.box import Box
from weft.plan.layout import Border
from weft.plan.model import ParamSpec
from weft.plan.plan import Plan, RankPlan, StagePlan
from weft.plan.tiling import Stored, Tiling
from weft.precision.registry import PRECISIONS
from weft.precision.roles import Roles, Tier
from weft.recompute.asked import modes_of_layer, offloads
from weft.recompute.registry import MODES
from weft.schedules.registry import SCHEDULES
from weft.train.engine import Engine, Updates
from weft.train.loss_scale import LossScale

Part = Sequence[MicroBatch]
"""This rank's microbatches of one global batch; its part of one may have no samples."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank holds of a model."""

    rank_plan: RankPlan
    comm: Comm
    stored: Mapping[str, Stored]
    """Of each parameter that it has a part of."""
    hollow: Set[str]
    """Parameters that need no memory: it is there only while they are gathered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What is trained, whatever it comes from, as one rank of a plan sees it."""

    specs: Sequence[ParamSpec]
    """Every trained parameter of the unsplit model."""
    tilings: Mapping[str, Tiling]
    """Where every trained parameter lives."""
    precision: Roles
    """What this rank's numbers are stored in, by role."""
    stage: Callable[[int, Share], Stage]
    """One of this rank's stages by number, with its part of the parameters."""
    split: Callable[[int, Stage, Share], None] | None = None
    """Lets a stage, by number, compute with parts of its parameters; None: it computes as it is."""
    objective: Callable[[Stage], Objective]
    """What becomes of the last stage's output."""
    borders: Mapping[int, Border] = field(default_factory=dict)
    """What crosses each border of the pipeline, by its number; empty where it depends on the
    batch."""
    expected_weight: float
    """About what the weights of a global batch add up to, a constant of the job."""
    may_be_absent: bool = False
    """A parameter that no sample used has no gradient, rather than a zero one."""
    buffers: Sequence[Buffer] = ()
    """Buffers whose values the job looks after; whoever brings modules looks after theirs."""
    histories: Histories | None = None
    """Of products that are already made to multiply in eight bits; None: of those that the plan
    asks for."""
    folder: str | None = None
    """Where activations are that wait on disk; None: where the system has its temporary files."""

    def histories_in(self, plan: Plan, comm: Comm) -> Histories:
        """What delayed scales of a plan are made of."""
        return self.histories or histories_of(plan, self.specs, comm)


def whole_tilings(specs: Sequence[ParamSpec], plan: Plan) -> dict[str, Tiling]:
    """Every rank of a stage that computes with a parameter holds all of it."""
    tilings = {}
    for spec in specs:
        ranks = [rank for stage in stages_with(spec, plan) for rank in stage.mesh.ranks]
        tilings[spec.name] = Tiling(spec.shape, dict.fromkeys(ranks, (Box.whole(spec.shape),)))
    return tilings


Update = TypeVar("Update", bound=Updates)
"""What changes the parameters."""


@dataclass(frozen=True, slots=True)
class Assembled(Generic[Update]):
    """What one rank of a job is made of."""

    stages: Mapping[int, Stage]
    """This rank's part of the model by stage number."""
    executor: Executor
    engine: Engine[Part]
    optimizer: Update
    specs: Sequence[ParamSpec]
    """Every parameter of the unsplit model."""
    histories: Histories
    """By which products in eight bits are scaled, where a stage asks for that."""
    residents: Residents | None = None
    """Which experts are on the device, where these are kept elsewhere."""
    meeting: Meeting | None = None
    """Where the plan has sites: how they become one model now and then."""

    def expect(self, weight: float) -> None:
        """What weights of the next global batch add up to, about: the same on every rank."""
        self.executor.scale = self.engine.expected_weight = weight

    @property
    def gradients(self) -> Gradients:
        return self.engine.gradients


Built = Assembled[Optimizer]
"""A rank of ``weft train``."""


def assemble(
    plan: Plan,
    source: Source,
    comm: Comm,
    make_optimizer: Callable[[Gradients], Update],
    *,
    max_grad_norm: float | None = None,
    skips_non_finite: bool = False,
    overlap: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
) -> Assembled[Update]:
    """This rank's stages and engine. Where a source leaves parameters without values: ``fill``.

    Collective: every rank of the plan calls it with the same arguments. Numbers depend on neither
    ``overlap`` nor ``bucket_bytes``.
    """
    rank_plan = plan.rank_plan(comm.rank)
    _refuse_shared_buffers(plan, source.buffers)
    pieces = held_pieces(plan, source.specs, source.tilings)
    held = {name: tiling.boxes.get(comm.rank) for name, tiling in source.tilings.items()}
    stored = {name: Stored(boxes) for name, boxes in held.items() if boxes is not None}
    share = Share(rank_plan, comm, stored, _hollow(pieces, comm.rank))
    stages = {number: source.stage(number, share) for number in rank_plan.stages}
    buffers = RunningBuffers(source.buffers, stages.values(), rank_plan)
    comm.open_groups(axis_groups(plan, comm.members))
    params = local_params(list(stages.values()), source.specs, stored)
    gradients = gradient_path(
        params,
        pieces,
        comm,
        precision=source.precision,
        overlap=overlap,
        rounds=rank_plan.pipeline_plan.num_microbatches,
        bucket_bytes=bucket_bytes,
        may_be_absent=source.may_be_absent,
    )
    comm.open_channels(channels(plan), edges(rank_plan.pipeline_plan, source.borders))
    work = WeightWork() if SCHEDULES[rank_plan.pipeline_plan.schedule].splits_backward else None
    histories = source.histories_in(plan, comm)
    eight = eight_bits(params, rank_plan, comm, pieces=pieces, histories=histories)
    for number, stage in stages.items():
        if source.split is not None:
            source.split(number, stage, share)
        _apply(stage, rank_plan.pipeline_plan.stages[number], eight, work)
    refuse_other_uses(stages.values(), params, pieces)
    _offload(stages, rank_plan.pipeline_plan.stages, comm.device, source.folder)
    residents = _residents(rank_plan, gradients)
    scale = source.expected_weight
    scaled = any(PRECISIONS[stage.precision].scales_loss for _, _, stage in plan.stages())
    loss_scale = LossScale(comm.device) if scaled else None
    executor = Executor(
        rank_plan,
        _computation(
            source, rank_plan, stages, gradients, params, buffers=buffers, residents=residents
        ),
        comm,
        gradients,
        scale=scale,
        loss_scale=None if loss_scale is None else loss_scale.value,
        work=work,
    )
    optimizer = make_optimizer(gradients)
    engine: Engine[Part] = Engine(
        histories.observing(executor.train),
        gradients,
        optimizer,
        comm,
        settle=executor.buffers.settle,
        expected_weight=scale,
        loss_scale=loss_scale,
        max_grad_norm=max_grad_norm,
        skips_non_finite=skips_non_finite,
    )
    return Assembled(stages, executor, engine, optimizer, source.specs, histories, residents)


def _hollow(pieces: Mapping[str, Sequence[Held]], rank: int) -> set[str]:
    """As ``Share.hollow``: all that a rank has of it comes and goes."""
    own = {name: [held for held in cut if rank in held.ranks] for name, cut in pieces.items()}
    return {name for name, cut in own.items() if cut and all(held.level == 3 for held in cut)}


def _residents(rank_plan: RankPlan, gradients: Gradients) -> Residents | None:
    """Of experts that are kept elsewhere than on the device, if any are."""
    if all(flat.bucket.tier == "device" for flat in gradients.sharded):
        return None
    return Residents(rank_plan.stage_plan.expert_layers)


def _refuse_shared_buffers(plan: Plan, buffers: Sequence[Buffer]) -> None:
    """Ranks that compute the same samples in parts would each add a part, or each add all."""
    running = [buffer for buffer in buffers if buffer.rule != "constant" and not buffer.over]
    shares = any(not plan.rank_plan(rank).counts_samples for rank in plan.ranks)
    if running and shares:
        expected = "constant in a plan whose ranks divide a sample's computation"
        raise ConfigError(f"model.{running[0].name}", running[0].rule, expected)


def gradient_path(
    params: Sequence[LocalParam],
    pieces: Mapping[str, Sequence[Held]],
    comm: Comm,
    *,
    precision: Roles,
    overlap: bool = True,
    rounds: int = 1,
    bucket_bytes: int = BUCKET_BYTES,
    may_be_absent: bool = False,
) -> Gradients:
    """The gradients of this rank's parameters. Collective."""
    return Gradients(
        params,
        pieces,
        comm,
        precision=precision,
        overlap=overlap,
        rounds=rounds,
        bucket_bytes=bucket_bytes,
        may_be_absent=may_be_absent,
    )


def local_params(
    stages: Sequence[Stage], specs: Sequence[ParamSpec], stored: Mapping[str, Stored]
) -> list[LocalParam]:
    """The trained parameters that these stages hold, in the order of the unsplit model.

    Ranks that share some must put them in the same buckets, whatever else each of them holds and
    wherever it uses them. Two stages that hold the same one (the ends of a V with a tied head) then
    share it.
    """
    by_name = {spec.name: spec for spec in specs}
    found: dict[str, LocalParam] = {}
    for module in (stage.module for stage in stages):
        for name, param in list(module.named_parameters()):
            if name in found:
                first = found[name]
                found[name] = replace(first, uses=first.uses + 1)
                owner, _, leaf = name.rpartition(".")
                module.get_submodule(owner).register_parameter(leaf, first.param)
            elif name in by_name:
                found[name] = LocalParam(by_name[name], stored[name], param)
    return [found[spec.name] for spec in specs if spec.name in found]


def _apply(
    stage: Stage, asked: StagePlan, eight: EightBits | None, work: WeightWork | None
) -> None:
    """Apply a stage's settings to its blocks, in one fixed order: products in eight bits, defer,
    recompute, compile."""
    blocks = _blocks(stage)
    lacking = zip(((0, "attention"), (len(blocks) - 1, "feed_forward")), asked.cut, strict=True)
    absent = [where for where, is_cut in lacking if is_cut]
    for number, unit in enumerate(blocks):
        if eight is not None and unit.block is not None:
            unit.replace(eight.apply(unit.block))
        if work is not None and unit.may_defer and unit.block is not None:
            defer_linears(unit.block, work)
        for mode in map(MODES.__getitem__, modes_of_layer(asked.recompute, number)):
            if mode.is_on and (number, mode.branch) not in absent:
                recompute(unit, mode)
        if asked.compile:
            unit.compile()
    _tell_losses(stage, compiled=asked.compile)


def _tell_losses(stage: Stage, *, compiled: bool) -> None:
    """Those of heads are compiled where blocks are."""
    for module in stage.module.modules():
        if isinstance(module, LinearCrossEntropy):
            module.compiled = compiled


def _blocks(stage: Stage) -> list[Unit]:
    return [unit for unit in stage.units.values() if unit.block is not None]


def _offload(
    stages: Mapping[int, Stage],
    asked: Sequence[StagePlan],
    device: torch.device,
    folder: str | None,
) -> None:
    """Let blocks keep what backward reads elsewhere: the outermost of their settings."""
    made: dict[Tier, Callable[[], Ways]] = {
        "host": lambda: ToHost(device),
        "disk": lambda: ToDisk(device, folder),
    }
    for tier, make in made.items():
        away = [
            [unit for n, unit in enumerate(_blocks(stage)) if offloads(modes, n, tier)]
            for number, stage in stages.items()
            if offloads(modes := asked[number].recompute, None, tier)
        ]
        ways = make() if away else None
        for units in away:
            assert ways is not None
            offload(units, ways)


def _computation(
    source: Source,
    rank_plan: RankPlan,
    stages: Mapping[int, Stage],
    gradients: Gradients,
    params: Sequence[LocalParam],
    *,
    buffers: RunningBuffers,
    residents: Residents | None,
) -> Computation:
    """What the executor runs: stages that gather in time, in passes, and the objective."""
    asked = rank_plan.pipeline_plan.stages
    all_units: list[UnitParams] = []
    attendances = {  # where ranks keep segments of parameters, units wait for whole ones
        number: gather_in_time(stage, gradients, params, all_units, residents)
        for number, stage in stages.items()
        if gradients.sharded
    }
    gradients.is_told_of_skips = bool(attendances)
    last = len(asked) - 1
    objective, part = None, None
    heads = rank_plan.pipeline_plan.heads
    for number in stages.keys() & {*heads}:
        stage = stages[number]
        assert isinstance(stage, InParts), f"{type(stage)} cannot be a part of the head"
        part = stage.part_objective
        if number in attendances:
            part = attendances[number].announced_part(part)
    if last in stages and not heads:
        objective = source.objective(stages[last])
        if last in attendances:
            objective = attendances[last].announced(objective)
        if asked[last].passes > 1:
            objective = objective_in_passes(objective, asked[last].passes)
    meets = rank_plan.stage_plan.mesh.spans_samples
    return Computation(
        stages={
            number: InPasses(stage, asked[number].passes, meets=meets)
            if asked[number].passes > 1
            else stage
            for number, stage in stages.items()
        },
        objective=objective,
        part=part,
        borders=source.borders,
        attendances=attendances,
        buffers=buffers,
    )


Values = Callable[[Tensor, ParamSpec, Box], None]
"""Writes values of one box of one parameter into a tensor of its size, of any dtype."""


@torch.no_grad()
def fill(gradients: Gradients, values: Values) -> None:
    """Give every parameter its values: initial ones, or a checkpoint's."""
    gradients.fence()
    for main in gradients.mains:
        values(main.value, main.spec, main.box)
    for frozen in gradients.frozen:  # rounded as what a master copy holds would be
        exact = torch.empty(frozen.box.size, dtype=gradients.precision.master.dtype)
        values(exact, frozen.spec, frozen.box)
        frozen.value.copy_(exact)
    gradients.publish()


def initial(seed: int) -> Values:
    """Initial values that depend on seed, name and global index alone."""

    def values(out: Tensor, spec: ParamSpec, box: Box) -> None:
        out.copy_(initial_values(seed, spec, box, out.dtype, out.device))

    return values

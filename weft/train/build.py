"""From a plan to live objects: this rank's part of the model, its gradients and its engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.config.sections import OptimConfig
from weft.memory.recompute import Recomputed
from weft.models.decoder import Decoder
from weft.models.registry import FAMILIES, build_model, module_names, param_specs
from weft.nn.init import initial_values
from weft.optim.groups import marked
from weft.optim.optimizer import Optimizer
from weft.parallel.apply import apply_layout, refuse_strangers, shrink_params
from weft.parallel.gradients import Gradients
from weft.parallel.params import (
    LocalParam,
    held_pieces,
    param_tilings,
    reduction_groups,
)
from weft.parallel.pipeline.deferred import WeightWork, defer_linears
from weft.parallel.pipeline.executor import Executor, MicroBatch, Stage
from weft.parallel.pipeline.passes import InPasses
from weft.parallel.pipeline.seam import channels
from weft.parallel.runtimes import axis_groups
from weft.parallel.sharding import Attendance, Unit, gather_in_time
from weft.plan.box import Box
from weft.plan.model import ModelSpec, ParamSpec
from weft.plan.plan import Plan, Seat, StagePlan
from weft.plan.tiling import Stored
from weft.precision.roles import PRECISIONS
from weft.schedules.registry import splits_backward
from weft.train.engine import Engine

Part = Sequence[MicroBatch | None]
"""This rank's microbatches of one global batch; None where its part of one is empty."""


@dataclass(frozen=True, slots=True)
class Built:
    """What one rank of a job is made of."""

    stages: Mapping[int, Decoder]
    """This rank's part of the model by stage number."""
    executor: Executor
    engine: Engine[Part]
    optimizer: Optimizer
    specs: Sequence[ParamSpec]
    """Every parameter of the unsplit model."""

    @property
    def gradients(self) -> Gradients:
        return self.engine.gradients


def build(
    plan: Plan,
    spec: ModelSpec,
    comm: Comm,
    *,
    optim: OptimConfig,
    seq_len: int,
    overlap: bool = True,
) -> Built:
    """This rank's stages and engine. Parameters are allocated, not yet filled: see ``fill``.

    Collective: every rank of the plan calls it with the same arguments.
    """
    seat = plan.seat(comm.rank)
    specs = marked(optim, param_specs(spec))
    tilings = param_tilings(plan, spec)
    pieces = held_pieces(plan, specs, tilings)
    comm.open_groups([*axis_groups(plan), *reduction_groups(pieces)])
    comm.open_gathering(reduction_groups(pieces, sharded=True))
    comm.open_channels(channels(plan))
    stored = {n: Stored(t.boxes[comm.rank]) for n, t in tilings.items() if comm.rank in t.boxes}
    hollow = {name for name, cut in pieces.items() if any(held.level == 3 for held in cut)}
    stages = {n: _stage(spec, seat, n, stored, hollow, comm.device) for n in seat.stages}
    gradients = Gradients(
        local_params(list(stages.values()), specs, stored),
        pieces,
        comm,
        precision=PRECISIONS[seat.stage_plan.precision],
        overlap=overlap,
        rounds=seat.pipeline_plan.num_microbatches,
    )
    layout = FAMILIES[spec.family].layout(spec)
    refuse_strangers(layout, module_names(spec))
    work = WeightWork() if splits_backward(seat.pipeline_plan.schedule) else None
    for number, model in stages.items():
        apply_layout(model, layout, seat, comm, sizes={"seq": seq_len})
        _apply(model, seat.pipeline_plan.stages[number], work)
    attendances = _gather_in_time(stages, gradients)
    scale = float(plan.global_batch * seq_len)
    passing = {n: _in_passes(stages[n], seat.pipeline_plan.stages[n].passes) for n in stages}
    border = (seq_len, spec.d_model)
    executor = Executor(
        seat,
        passing,
        comm,
        gradients,
        border=border,
        scale=scale,
        work=work,
        attendances=attendances,
    )
    optimizer = Optimizer(optim, gradients)
    engine: Engine[Part] = Engine(
        executor.train,
        gradients,
        optimizer,
        comm,
        expected_weight=scale,
        max_grad_norm=optim.max_grad_norm,
    )
    return Built(stages, executor, engine, optimizer, specs)


def _stage(
    spec: ModelSpec,
    seat: Seat,
    number: int,
    stored: Mapping[str, Stored],
    hollow: Set[str],
    device: torch.device,
) -> Decoder:
    """One stage's module for this rank's boxes, without values; ``hollow`` ones without memory."""
    stage = seat.pipeline_plan.stages[number]
    with torch.device("meta"):
        model = build_model(
            spec,
            range(*stage.layers),
            embed=seat.holds_embedding(number),
            head=seat.holds_head(number),
        )
    shrink_params(model, stored)
    buffers = [name for name, _ in model.named_buffers()]
    assert not buffers, f"a buffer would be left without values: {buffers}"
    for name, param in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        role = PRECISIONS[stage.precision].parameters
        empty = torch.empty(param.shape, dtype=role.dtype, device=role.place(device))
        if name in hollow:
            empty.untyped_storage().resize_(0)
        model.get_submodule(owner).register_parameter(leaf, nn.Parameter(empty))
    return model


def local_params(
    modules: Sequence[nn.Module], specs: Sequence[ParamSpec], stored: Mapping[str, Stored]
) -> list[LocalParam]:
    """The parameters these modules hold, by logical name, in forward order.

    Two modules that hold the same one (the ends of a V with a tied head) then share it.
    """
    by_name = {spec.name: spec for spec in specs}
    found: dict[str, LocalParam] = {}
    for module in modules:
        for name, param in list(module.named_parameters()):
            if name in found:
                first = found[name]
                found[name] = replace(first, uses=first.uses + 1)
                owner, _, leaf = name.rpartition(".")
                module.get_submodule(owner).register_parameter(leaf, first.param)
            else:
                found[name] = LocalParam(by_name[name], stored[name], param)
    return list(found.values())


def _apply(model: Decoder, stage: StagePlan, work: WeightWork | None) -> None:
    """Apply a stage's settings to its blocks, in one fixed order: defer, recompute, compile."""
    for name, block in model.layers.items():
        if work is not None:
            defer_linears(block, work)
        part: nn.Module = Recomputed(block) if stage.recompute == "full" else block
        if stage.compile:
            part.compile()
        model.layers[name] = part


def _gather_in_time(stages: Mapping[int, Decoder], gradients: Gradients) -> dict[int, Attendance]:
    """Where ranks keep segments of parameters, let modules wait for whole ones."""
    crew: list[Unit] = []
    attendances = {}
    for number, model in stages.items():
        if gradients.sharded:
            attendances[number] = gather_in_time(model, gradients.sharded, crew)
        model.register_state_dict_pre_hook(lambda *_: gradients.fence())  # type: ignore[no-untyped-call]
    return attendances


def _in_passes(stage: Decoder, passes: int) -> Stage:
    return stage if passes == 1 else InPasses(stage, passes)


Source = Callable[[ParamSpec, Box, torch.dtype], Tensor]
"""Values of one box of one parameter."""


@torch.no_grad()
def fill(gradients: Gradients, source: Source) -> None:
    """Give every parameter its values: initial ones, or a checkpoint's."""
    gradients.fence()
    for main in gradients.mains:
        main.value.copy_(source(main.spec, main.box, main.value.dtype))
    for frozen in gradients.frozen:  # rounded as what a master copy holds would be
        dtype = gradients.precision.master.dtype
        frozen.value.copy_(source(frozen.spec, frozen.box, dtype))
    gradients.publish()


def initial(seed: int) -> Source:
    """Initial values that depend on seed, name and global index alone."""

    def source(spec: ParamSpec, box: Box, dtype: torch.dtype) -> Tensor:
        return initial_values(seed, spec, box, dtype)

    return source

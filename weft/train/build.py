"""From a plan to live objects: this rank's part of the model, its gradients and its engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.config.sections import OptimConfig
from weft.memory.recompute import Recomputed
from weft.models.decoder import Decoder
from weft.models.registry import FAMILIES, build_model
from weft.nn.init import initial_values
from weft.optim.adamw import build_adamw
from weft.parallel.gradients import Gradients
from weft.parallel.params import LocalParam, param_pieces, param_tilings, reduction_groups
from weft.plan.box import Box
from weft.plan.model import ModelSpec, ParamSpec
from weft.plan.plan import Plan, Precision, StagePlan
from weft.train.engine import Engine, Sums
from weft.train.microbatch import MicroBatch

DTYPES: dict[Precision, tuple[torch.dtype, torch.dtype]] = {
    "fp64": (torch.float64, torch.float64),
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.float32),
}
"""Precision -> dtype of the model, dtype of accumulation, reduction and update."""

GROUP_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Built:
    """What one rank of a job is made of."""

    model: Decoder
    engine: Engine[MicroBatch]
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
    """This rank's model and engine. Parameters are allocated, not yet filled: see ``fill``.

    Collective: every rank of the plan calls it with the same arguments.
    """
    seat = plan.seat(comm.rank)
    stage = seat.stage_plan
    specs = FAMILIES[spec.family].param_specs(spec)
    pieces = param_pieces(param_tilings(plan, specs))
    comm.open_groups(reduction_groups(pieces), GROUP_TIMEOUT_S)
    dtype, main_dtype = DTYPES[stage.precision]
    model = _stage_model(spec, stage, comm.device, dtype, embed=seat.is_first, head=seat.is_last)
    gradients = Gradients(
        local_params(model, specs), pieces, comm, main_dtype=main_dtype, overlap=overlap
    )
    _apply(model, stage)
    engine: Engine[MicroBatch] = Engine(
        objective(model),
        gradients,
        build_adamw(gradients.mains, optim),
        comm,
        expected_weight=plan.global_batch * seq_len,
        max_grad_norm=optim.max_grad_norm,
    )
    return Built(model, engine, specs)


def _stage_model(
    spec: ModelSpec,
    stage: StagePlan,
    device: torch.device,
    dtype: torch.dtype,
    *,
    embed: bool,
    head: bool,
) -> Decoder:
    """The stage's module with storage of its own and no values."""
    with torch.device("meta"):
        model = build_model(spec, range(*stage.layers), embed=embed, head=head)
    buffers = [name for name, _ in model.named_buffers()]
    assert not buffers, f"a buffer would be left without values: {buffers}"
    return model.to(dtype).to_empty(device=device)


def local_params(model: nn.Module, specs: Sequence[ParamSpec]) -> list[LocalParam]:
    """The parameters this module holds, by logical name, in forward order."""
    by_name = {spec.name: spec for spec in specs}
    return [
        LocalParam(by_name[name], Box.whole(by_name[name].shape), param)
        for name, param in model.named_parameters()
    ]


def _apply(model: Decoder, stage: StagePlan) -> None:
    """Apply the stage's settings to its blocks, in one fixed order: recompute, then compile."""
    for name, block in model.layers.items():
        part: nn.Module = Recomputed(block) if stage.recompute == "full" else block
        if stage.compile:
            part.compile()
        model.layers[name] = part


def objective(model: Decoder) -> Callable[[MicroBatch], Sums]:
    """The weighted sum of token losses of a model on one microbatch."""

    def sums(microbatch: MicroBatch) -> Sums:
        hidden = model(microbatch.tokens, microbatch.context)
        loss = model.loss(hidden, microbatch.targets, microbatch.weights)
        return Sums(loss, microbatch.weights.sum(dtype=torch.float64))

    return sums


Source = Callable[[ParamSpec, Box, torch.dtype], Tensor]
"""Values of one box of one parameter."""


@torch.no_grad()
def fill(gradients: Gradients, source: Source) -> None:
    """Give every parameter its values: initial ones, or a checkpoint's."""
    for main in gradients.mains:
        main.value.copy_(source(main.spec, main.box, main.value.dtype))
    gradients.publish()


def initial(seed: int) -> Source:
    """Initial values that depend on seed, name and global index alone."""

    def source(spec: ParamSpec, box: Box, dtype: torch.dtype) -> Tensor:
        return initial_values(seed, spec, box, dtype)

    return source

"""PyTorch's own ways to spread a model over processes, set up as its documentation advises.

Every ``*_step`` function takes the whole job's ``[samples, seq + 1]`` tokens of a step, trains on
this rank's part of them, and returns its share of the loss: shares add up to the job's mean.
All use the plain Llama, fused AdamW, ``foreach`` clipping and gradients that are set to None.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.plain_llama import PlainLlama, token_loss
from weft.config.optim_sections import AdamWConfig
from weft.models.registry import FAMILIES
from weft.nn.init import initial_values
from weft.plan.box import Box
from weft.plan.model import ModelSpec

Step = Callable[[Tensor], Tensor]
SEED = 0
NORM_EPS = 1e-6
"""What ``clip_grad_norm_`` adds to a norm before it divides by it."""


def plain_model(spec: ModelSpec, device: torch.device) -> PlainLlama:
    """The plain Llama in fp32 with the initial values that Weft gives the same parameters."""
    model = PlainLlama(spec)
    with torch.no_grad():
        for param in FAMILIES[spec.family].param_specs(spec):
            name = param.name.replace(".attn.", ".").replace(".ff.", ".")
            values = initial_values(SEED, param, Box.whole(param.shape), torch.float32)
            model.get_parameter(name).copy_(values)
    return model.to(device)


def groups(model: nn.Module, optim: AdamWConfig) -> list[dict[str, Any]]:
    """Parameters with and without weight decay: norms and embeddings do not decay."""
    decay, rest = [], []
    for name, parameter in model.named_parameters():
        (decay if parameter.ndim > 1 and "embed" not in name else rest).append(parameter)
    return [
        {"params": decay, "weight_decay": optim.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]


def adamw(model: nn.Module, optim: AdamWConfig) -> torch.optim.Optimizer:
    """The update that Weft does."""
    return torch.optim.AdamW(
        groups(model, optim), lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True
    )


def ddp_step(
    spec: ModelSpec, optim: AdamWConfig, device: torch.device, *, autocast: bool = False
) -> Step:
    """DistributedDataParallel; in bf16 with autocast, as most people use it."""
    model = DistributedDataParallel(plain_model(spec, device), gradient_as_bucket_view=True)
    return _data_parallel(model, adamw(model, optim), optim, autocast=autocast)


def zero1_step(spec: ModelSpec, optim: AdamWConfig, device: torch.device) -> Step:
    """DistributedDataParallel whose optimizer keeps a part of the state on each rank."""
    model = DistributedDataParallel(plain_model(spec, device), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        groups(model, optim),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        fused=True,
    )
    return _data_parallel(model, optimizer, optim)


def fsdp_step(
    spec: ModelSpec,
    optim: AdamWConfig,
    device: torch.device,
    *,
    reshard: bool,
    mixed: bool = False,
) -> Step:
    """FSDP2, a group for each block; without ``reshard`` parameters stay whole until backward."""
    model = plain_model(spec, device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if mixed:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return _data_parallel(model, adamw(model, optim), optim)


def _data_parallel(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    optim: AdamWConfig,
    *,
    autocast: bool = False,
) -> Step:
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def step(tokens: Tensor) -> Tensor:
        mode: AbstractContextManager[object] = nullcontext()
        if autocast:
            mode = torch.autocast(tokens.device.type, dtype=torch.bfloat16)
        with mode:
            loss = token_loss(model, tokens.chunk(world_size)[rank])
        loss.backward()
        _update(model, optimizer, optim)
        return loss.detach() / world_size

    return step


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, optim: AdamWConfig) -> None:
    if optim.max_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def tensor_step(spec: ModelSpec, optim: AdamWConfig, device: torch.device) -> Step:
    """DTensor with sequence parallelism, attention on local tensors, the loss on split logits."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))
    model = plain_model(spec, device)
    _split(model, mesh)
    optimizer = adamw(model, optim)

    def step(tokens: Tensor) -> Tensor:
        with loss_parallel():
            loss = token_loss(model, tokens)
            loss.backward()
        _update(model, optimizer, optim)
        return loss.detach().full_tensor() / world_size  # type: ignore[attr-defined]

    return step


def _split(model: PlainLlama, mesh: DeviceMesh) -> None:
    seq, whole = Shard(1), Replicate()
    outer = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=seq),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=seq, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, outer)
    columns = dict.fromkeys(("q", "k", "v", "gate", "up"), ColwiseParallel())
    rows = dict.fromkeys(("o", "down"), RowwiseParallel(output_layouts=seq))
    norms = ("attn_norm", "ff_norm")
    # The norm's output is gathered once for all matrices that use it.
    gather = PrepareModuleOutput(
        output_layouts=seq, desired_output_layouts=whole, use_local_output=False
    )
    for block in model.layers:
        parallelize_module(block, mesh, dict.fromkeys(norms, SequenceParallel()))
        parallelize_module(block, mesh, {**columns, **rows, **dict.fromkeys(norms, gather)})


class _Part(nn.Module):
    """Some of the layers, with the embedding before or the head after them."""

    def __init__(self, model: PlainLlama, layers: range) -> None:
        super().__init__()
        is_first, is_last = layers.start == 0, layers.stop == len(model.layers)
        self.embed = model.embed if is_first else None
        self.layers = nn.ModuleList(model.layers[i] for i in layers)
        self.norm = model.norm if is_last else None
        self.head = model.head if is_last else None
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.layers:
            x = block(x, self.cos, self.sin)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def pipeline_step(
    spec: ModelSpec,
    optim: AdamWConfig,
    device: torch.device,
    *,
    schedule: type[Schedule1F1B] | type[ScheduleGPipe],
    layers: tuple[range, ...],
    num_microbatches: int,
) -> Step:
    """One stage a rank, microbatches of equal size."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    part = _Part(plain_model(spec, device), layers[rank])
    optimizer = adamw(part, optim)
    stage = PipelineStage(part, rank, len(layers), device)
    run = schedule(stage, num_microbatches, loss_fn=_logits_loss)

    def step(tokens: Tensor) -> Tensor:
        losses: list[Tensor] = []
        given = (tokens[:, :-1],) if rank == 0 else ()
        target = tokens[:, 1:] if rank == last else None
        run.step(*given, target=target, losses=losses, return_outputs=False)
        _clip_across_stages(part, optim)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).detach().mean() if losses else torch.zeros((), device=device)

    return step


def _logits_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _clip_across_stages(part: nn.Module, optim: AdamWConfig) -> None:
    if optim.max_grad_norm is None:
        return
    grads = [p.grad for p in part.parameters() if p.grad is not None]
    squares = nn.utils.get_total_norm(grads, foreach=True).square()
    dist.all_reduce(squares)
    nn.utils.clip_grads_with_norm_(
        part.parameters(), optim.max_grad_norm, squares.sqrt(), foreach=True
    )

"""``weft.weave``: spread a plain PyTorch training loop over processes by changing three lines.

The script stays a single-device script: every process runs it, sees the same whole batches, and
``engine.step`` trains on this process's part of each. Started alone it is a one-process run;
under torchrun, or any launcher that sets RANK and WORLD_SIZE, the processes join.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.comm.join import join
from weft.comm.place import Place
from weft.config.errors import ConfigError
from weft.parallel.gradients import Gradients
from weft.parallel.params import Held, LocalParam, reduction_groups
from weft.plan.box import Box
from weft.plan.model import Init, ParamSpec
from weft.plan.plan import Plan
from weft.plan.tiling import split_evenly
from weft.planner.validate import validate_plan
from weft.platform.registry import platform_named
from weft.precision.dtypes import MODEL_DTYPE
from weft.train.engine import Engine, StepResult

Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor]]
"""(model, batch) -> losses of any shape, not reduced; or (losses, weights) of the same shape."""


class WovenEngine:
    """What ``weave`` returns: one call trains on one global batch."""

    def __init__(self, engine: Engine[Any], comm: Comm, plan: Plan | None) -> None:
        self._engine = engine
        self._comm = comm
        self._plan = plan
        self.last: StepResult | None = None
        """Loss, weight and gradient norm of the last step, over the whole job."""

    @property
    def rank(self) -> int:
        """Number of this process; rank 0 is the one that should print and save."""
        return self._comm.rank

    def step(self, batch: Any) -> Tensor:
        """Forward, backward, reduce, clip, update on this process's part of ``batch``.

        ``batch`` is the whole global batch, the same on every process: a tensor, or a tuple,
        list or dict of tensors, all with samples along their first dimension. The result is the
        mean loss over the whole job's weighted elements, a scalar.

        Raises:
            ConfigError: the batch has no samples, or not as many as the plan says.
        """
        count = _num_samples(batch)
        self.last = self._engine.step([_rows(batch, part) for part in self._parts(count) if part])
        return self.last.loss

    def _parts(self, count: int) -> list[range]:
        if self._plan is not None:
            if count != self._plan.global_batch:
                expected = f"{self._plan.global_batch} samples, as in the plan"
                raise ConfigError("batch", f"{count} samples", expected)
            return self._plan.seat(self._comm.rank).microbatches()
        sizes = split_evenly(count, self._comm.world_size)
        first = sum(sizes[: self._comm.rank])
        return [range(first, first + sizes[self._comm.rank])]


def weave(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: Loss | None = None,
    plan: Plan | Literal["auto"] = "auto",
    precision: Literal["fp64", "fp32", "bf16"] | None = None,
    max_grad_norm: float | None = None,
) -> WovenEngine:
    """Make a model and its optimizer train over every process of the job.

    Args:
        model: Any module whose forward treats samples independently. All processes start from
            rank 0's values.
        optimizer: Built over ``model.parameters()``, not yet stepped. With ``bf16`` it updates
            fp32 master copies.
        loss: How to get losses from the model and a batch; None: ``model(*batch)`` returns them.
        plan: "auto" gives every process an equal part of each batch; a ``Plan`` of single-stage
            pipelines gives unequal parts and microbatches; precision and device stay the model's.
        precision: Dtype of the model; None leaves it as it is.
        max_grad_norm: Clip gradients to this norm.

    Raises:
        ConfigError: something about the model, optimizer or plan cannot work.
    """
    place = Place.from_environment() or Place()
    parameters = dict(model.named_parameters())
    _check(model, optimizer, parameters, place.world_size)
    if isinstance(plan, Plan):
        _check_plan(plan, place.world_size)
    platform = platform_named(next(iter(parameters.values())).device.type)
    device = platform.device(place.local_rank)
    comm = join(place, backend=platform.collective_backend, device=device)
    atexit.register(comm.close)
    gradients = _gradients(model.to(device), comm, precision)
    _point_at_mains(optimizer, gradients)
    passes = _passes(model, loss or _forward, gradients, device)
    engine: Engine[Any] = Engine(passes, gradients, optimizer, comm, max_grad_norm=max_grad_norm)
    return WovenEngine(engine, comm, plan if isinstance(plan, Plan) else None)


def _check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, nn.Parameter],
    world_size: int,
) -> None:
    if not parameters:
        raise ConfigError("model", type(model).__name__, "a module with parameters")
    known = {id(param) for param in parameters.values()}
    strangers = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in known]
    if strangers:
        expected = "an optimizer over model.parameters()"
        raise ConfigError("optimizer", f"{len(strangers)} other tensors", expected)
    if optimizer.state:
        hint = "Weave first, then load the optimizer's state."
        raise ConfigError("optimizer", "already stepped", "a new optimizer", hint)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and world_size > 1:
            expected = "a module that treats samples independently"
            hint = "Use GroupNorm or LayerNorm: batch statistics would depend on the split."
            raise ConfigError(f"model.{name}", type(module).__name__, expected, hint)


def _check_plan(plan: Plan, world_size: int) -> None:
    """Only samples can be divided: a module that Weft does not know cannot be cut."""
    validate_plan(plan, num_layers=plan.num_layers, global_batch=plan.global_batch)
    if plan.world_size != world_size:
        raise ConfigError("plan", f"{plan.world_size} ranks", f"{world_size} ranks")
    for p, s, stage in plan.stages():
        if s or stage.mesh.size("tp") > 1:
            expected = "one stage, without a tp axis"
            raise ConfigError(f"plan.pipelines[{p}]", "a model that is cut", expected)
        if stage.recompute != "off" or stage.compile:
            value = {"recompute": stage.recompute, "compile": stage.compile}
            hint = "Weft does not know the blocks of this module: apply them to it yourself."
            raise ConfigError(f"plan.pipelines[{p}].stages[{s}]", value, "both off", hint)


def _gradients(
    model: nn.Module, comm: Comm, precision: Literal["fp64", "fp32", "bf16"] | None
) -> Gradients:
    """Rank 0's values everywhere, then the gradient path over whole parameters."""
    for tensor in [*model.parameters(), *model.buffers()]:
        comm.broadcast(tensor.detach(), src=0, name="initial values")
    params = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if precision is not None:
        exact = {name: param.detach().clone() for name, param in params}
        model.to(MODEL_DTYPE[precision])
    dtypes = {param.dtype for _, param in params}
    main = torch.float64 if torch.float64 in dtypes else torch.float32
    local = [LocalParam(_spec(n, p), Box.whole(tuple(p.shape)), p) for n, p in params]
    pieces = {p.spec.name: [Held(p.spec, p.box, comm.world)] for p in local}
    comm.open_groups(reduction_groups(pieces))
    gradients = Gradients(local, pieces, comm, main_dtype=main)
    if precision is not None:
        for part in gradients.mains:
            part.value.detach().copy_(exact[part.spec.name])
    return gradients


def _spec(name: str, param: nn.Parameter) -> ParamSpec:
    shape = tuple(param.shape)
    return ParamSpec(name=name, shape=shape, part=0, init=Init("zeros"), decay=False)


def _point_at_mains(optimizer: torch.optim.Optimizer, gradients: Gradients) -> None:
    """Let the optimizer update master copies where the model has another precision."""
    mains = {id(main.param): main.value for main in gradients.mains}
    for group in optimizer.param_groups:
        group["params"] = [mains.get(id(param), param) for param in group["params"]]


def _forward(model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
    result: Tensor | tuple[Tensor, Tensor] = (
        model(**batch) if isinstance(batch, dict) else model(*_as_tuple(batch))
    )
    return result


def _passes(
    model: nn.Module, loss: Loss, gradients: Gradients, device: torch.device
) -> Callable[[Sequence[Any]], Tensor]:
    """Forward and backward of each microbatch in turn."""
    losses_of = _weighted(model, loss)

    def run(microbatches: Sequence[Any]) -> Tensor:
        gradients.begin(len(microbatches))
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        for microbatch in microbatches:
            total, weight = losses_of(microbatch)
            total.backward()  # type: ignore[no-untyped-call]
            totals += torch.stack([total.detach().double(), weight])
        return totals

    return run


def _weighted(model: nn.Module, loss: Loss) -> Callable[[Any], tuple[Tensor, Tensor]]:
    """(sum of weight x loss, sum of weights) of a microbatch; the weight in fp64."""

    def sums(batch: Any) -> tuple[Tensor, Tensor]:
        result = loss(model, batch)
        losses, weights = result if isinstance(result, tuple) else (result, None)
        if losses.ndim == 0:
            hint = 'Pass reduction="none": Weft takes the mean over the whole job.'
            raise ConfigError("loss", "a scalar", "losses that are not reduced", hint)
        if weights is None:
            return losses.sum(), torch.tensor(
                float(losses.numel()), dtype=torch.float64, device=losses.device
            )
        return (losses * weights).sum(), weights.sum(dtype=torch.float64)

    return sums


def _as_tuple(batch: Any) -> Sequence[Any]:
    return batch if isinstance(batch, tuple | list) else (batch,)


def _num_samples(batch: Any) -> int:
    sizes = {len(tensor) for tensor in _leaves(batch)}
    if len(sizes) != 1 or 0 in sizes:
        expected = "tensors with the same number of samples, at least one, along dimension 0"
        raise ConfigError("batch", sorted(sizes), expected)
    return sizes.pop()


def _leaves(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    parts = batch.values() if isinstance(batch, dict) else batch
    return [leaf for part in parts for leaf in _leaves(part)]


def _rows(batch: Any, part: range) -> Any:
    """The samples ``part`` of a batch, in the same nesting."""
    if isinstance(batch, Tensor):
        return batch[part.start : part.stop]
    if isinstance(batch, dict):
        return {key: _rows(value, part) for key, value in batch.items()}
    return type(batch)(_rows(value, part) for value in batch)

"""``weft.weave``: spread a plain PyTorch training loop over processes by changing three lines.

The script stays a single-device script: every process runs it, sees the same whole batches, and
``engine.step`` trains on this process's part of each. Started alone it is a one-process run;
under torchrun, or any launcher that sets RANK and WORLD_SIZE, the processes join.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from weft.api.distributed import membership_of
from weft.api.engine import (
    Parts,
    WovenEngine,
    num_samples,
    own,
    point_at_mains,
    refuse_batch_statistics,
    refuse_woven,
    rows,
    set_exact,
)
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.config.errors import ConfigError
from weft.optim.pytorch import TorchOptimizer
from weft.parallel.gradients import Gradients
from weft.parallel.params import Held, LocalParam, reduction_groups
from weft.plan.model import Init, ParamSpec
from weft.plan.plan import Plan, ZeroLevel
from weft.plan.tiling import Stored, split_evenly
from weft.planner.sharing import refuse_idle_zero
from weft.planner.validate import validate_plan
from weft.platform.registry import platform_named
from weft.precision.roles import PRECISIONS
from weft.train.engine import Engine

ModelPrecision = Literal["fp64", "fp32", "bf16"]
Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor]]
"""(model, batch) -> losses of any shape, not reduced; or (losses, weights) of the same shape."""


def weave(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: Loss | None = None,
    plan: Plan | Literal["auto"] = "auto",
    precision: ModelPrecision | None = None,
    max_grad_norm: float | None = None,
) -> WovenEngine:
    """Make a model and its optimizer train over every process of the job.

    Args:
        model: Any module whose forward treats samples independently. All processes start from
            rank 0's values.
        optimizer: Built over ``model.parameters()``, not yet stepped. With ``bf16`` it updates
            fp32 master copies.
        loss: How to get losses from the model and a batch; None: ``model(*batch)`` returns them.
        plan: "auto" gives every process an equal part of each batch, however fast it is: only
            ``weft train`` searches. A ``Plan`` of single-stage pipelines gives unequal parts and
            microbatches; it names the model's precision and device.
        precision: Dtype of the model; None leaves it as it is.
        max_grad_norm: Clip gradients to this norm.

    Raises:
        ConfigError: something about the model, optimizer or plan cannot work.
    """
    address = RankAddress.from_environment() or RankAddress()
    parameters = dict(model.named_parameters())
    _check(model, optimizer, parameters, address.world_size)
    if precision is not None and precision not in get_args(ModelPrecision):
        raise ConfigError("precision", precision, f"None or one of {get_args(ModelPrecision)}")
    if isinstance(plan, Plan):
        _check_plan(plan, address.world_size)
        _refuse_unlike(plan, parameters.values(), precision)
    elif plan != "auto":
        raise ConfigError("plan", plan, '"auto" or a weft.plan.plan.Plan')
    platform = platform_named(next(iter(parameters.values())).device.type)
    device = platform.device(address.local_rank)
    comm = join(address, backend=platform.collective_backend, device=device)
    atexit.register(comm.close)
    given = plan if isinstance(plan, Plan) else None
    model.to(device)
    settings = Settings(loss or _forward, given, precision, max_grad_norm)
    return woven(model, optimizer, comm, settings)


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``weave`` was asked for, beside the model and its optimizer."""

    loss: Loss
    plan: Plan | None = None
    precision: ModelPrecision | None = None
    max_grad_norm: float | None = None


def woven(
    model: nn.Module, optimizer: torch.optim.Optimizer, comm: Comm, settings: Settings
) -> WovenEngine:
    """An engine among the processes of ``comm``, for what ``weave`` has checked."""
    gradients = _gradients(model, comm, settings)
    trained = [param for param in model.parameters() if param.requires_grad]
    point_at_mains(optimizer, gradients, trained)
    passes = _Passes(model, settings.loss, gradients, comm.device)
    updates = TorchOptimizer(optimizer, gradients)
    engine: Engine[Any] = Engine(
        passes.train, gradients, updates, comm, max_grad_norm=settings.max_grad_norm
    )

    def cut(batch: Any) -> list[Any]:
        parts = _parts(num_samples(batch), settings.plan, comm)
        return [rows(batch, part) for part in parts if part]

    result = WovenEngine(engine, updates, comm, Parts(cut, passes.evaluate, {0: model}))
    own(model, result)
    return result


def _parts(count: int, plan: Plan | None, comm: Comm) -> list[range]:
    """Which samples of a global batch each microbatch of this process has."""
    if plan is not None:
        if count != plan.global_batch:
            expected = f"{plan.global_batch} samples, as in the plan"
            raise ConfigError("batch", f"{count} samples", expected)
        return plan.seat(comm.rank).microbatches()
    sizes = split_evenly(count, comm.world_size)
    first = sum(sizes[: comm.rank])
    return [range(first, first + sizes[comm.rank])]


def _check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, nn.Parameter],
    world_size: int,
) -> None:
    if not parameters:
        raise ConfigError("model", type(model).__name__, "a module with parameters")
    refuse_woven("model", model)
    if any(membership_of(module) is not None for module in model.modules()):
        hint = "The engine adds up gradients itself."
        value = "from weft.distributed_model"
        raise ConfigError("model", value, "a model that has not joined a job", hint)
    known = {id(param) for param in parameters.values()}
    strangers = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in known]
    if strangers:
        expected = "an optimizer over model.parameters()"
        raise ConfigError("optimizer", f"{len(strangers)} other tensors", expected)
    if optimizer.state:
        hint = "Weave first, then load the optimizer's state."
        raise ConfigError("optimizer", "already stepped", "a new optimizer", hint)
    if world_size > 1:
        refuse_batch_statistics("model", model)


def _check_plan(plan: Plan, world_size: int) -> None:
    """Only samples can be divided: a module that Weft does not know cannot be cut."""
    validate_plan(plan, num_layers=plan.num_layers, global_batch=plan.global_batch)
    if plan.world_size != world_size:
        raise ConfigError("plan", f"{plan.world_size} ranks", f"{world_size} ranks")
    for p, s, stage in plan.stages():
        if s or stage.mesh.size("tp") > 1:
            expected = "one stage, without a tp axis"
            raise ConfigError(f"plan.pipelines[{p}]", "a model that is cut", expected)
        if stage.zero == 3:
            hint = "Weft does not know when this module needs which of its parameters."
            raise ConfigError(f"plan.pipelines[{p}].stages[{s}].zero", 3, "2 at most", hint)
        if stage.passes > 1:
            hint = "A smaller microbatch does the same here."
            key = f"plan.pipelines[{p}].stages[{s}].passes"
            raise ConfigError(key, stage.passes, "1", hint)
        if stage.recompute != "off" or stage.compile:
            value = {"recompute": stage.recompute, "compile": stage.compile}
            hint = "Weft does not know the blocks of this module: apply them to it yourself."
            raise ConfigError(f"plan.pipelines[{p}].stages[{s}]", value, "both off", hint)
    refuse_idle_zero(plan, tied=False)


def _refuse_unlike(
    plan: Plan, params: Collection[nn.Parameter], precision: ModelPrecision | None
) -> None:
    """A plan that says another device or precision than the model's would not be followed."""
    devices = sorted({param.device.type for param in params})
    dtypes = {param.dtype for param in params}
    if precision is not None:
        dtypes = {PRECISIONS[precision].compute.dtype}
    for p, s, stage in plan.stages():
        where = f"plan.pipelines[{p}].stages[{s}]"
        if [stage.device] != devices:
            expected = f"that of the model ({', '.join(devices)})"
            raise ConfigError(f"{where}.device", stage.device, expected)
        if {PRECISIONS[stage.precision].compute.dtype} != dtypes:
            hint = "Give weave the same precision as the plan."
            expected = f"that of the model ({', '.join(sorted(map(str, dtypes)))})"
            raise ConfigError(f"{where}.precision", stage.precision, expected, hint)


def _gradients(model: nn.Module, comm: Comm, settings: Settings) -> Gradients:
    """Rank 0's values everywhere, then the gradient path over whole parameters."""
    for tensor in [*model.parameters(), *model.buffers()]:
        comm.broadcast(tensor.detach(), src=0, name="initial values")
    params = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    exact = {}
    if settings.precision is not None:
        exact = {name: param.detach().clone() for name, param in params}
        model.to(PRECISIONS[settings.precision].parameters.dtype)
    dtypes = {param.dtype for _, param in params}
    roles = PRECISIONS["fp64" if torch.float64 in dtypes else "fp32"]
    local = [LocalParam(_spec(n, p), Stored.whole(p.shape), p) for n, p in params]
    sharing = _sharing(settings.plan, comm.world_size)
    pieces = {
        p.spec.name: [
            Held(p.spec, box, comm.world, sharing.level, sharing.is_in_one_stage)
            for box in p.stored.boxes
        ]
        for p in local
    }
    comm.open_groups(reduction_groups(pieces))
    comm.open_gathering(reduction_groups(pieces, sharded=True))
    gradients = Gradients(
        local, pieces, comm, precision=roles, rounds=sharing.rounds, may_be_absent=True
    )
    set_exact(gradients, exact)
    return gradients


@dataclass(frozen=True, slots=True)
class _Sharing:
    """How the processes, which all hold every parameter, keep its state."""

    level: ZeroLevel = 0
    is_in_one_stage: bool = True
    rounds: int = 1
    """Microbatches of a step."""


def _sharing(plan: Plan | None, world_size: int) -> _Sharing:
    if plan is None or world_size == 1:
        return _Sharing()
    level = min(stage.zero for _, _, stage in plan.stages())
    rounds = max(pipeline.num_microbatches for pipeline in plan.pipelines)
    return _Sharing(level, len(plan.pipelines) == 1, rounds)


def _spec(name: str, param: nn.Parameter) -> ParamSpec:
    shape = tuple(param.shape)
    return ParamSpec(name=name, shape=shape, part=0, init=Init("zeros"), decay=False)


def _forward(model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
    result: Tensor | tuple[Tensor, Tensor] = (
        model(**batch) if isinstance(batch, Mapping) else model(*_as_tuple(batch))
    )
    return result


class _Passes:
    """Forward, and backward, of each microbatch in turn."""

    def __init__(
        self, model: nn.Module, loss: Loss, gradients: Gradients, device: torch.device
    ) -> None:
        self._losses_of = _weighted(model, loss)
        self._gradients = gradients
        self._device = device

    def train(self, microbatches: Sequence[Any]) -> Tensor:
        """This process's sums ``[loss, weight]``, fp64, gradients left behind."""
        self._gradients.begin(len(microbatches))
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        for microbatch in microbatches:
            total, weight = self._losses_of(microbatch)
            total.backward()  # type: ignore[no-untyped-call]
            totals += torch.stack([total.detach().double(), weight])
        return totals

    def evaluate(self, microbatches: Sequence[Any]) -> Tensor:
        """The same sums, of forwards alone."""
        sums = [self._losses_of(microbatch) for microbatch in microbatches]
        zero = torch.zeros(2, dtype=torch.float64, device=self._device)
        return sum((torch.stack([total.double(), weight]) for total, weight in sums), zero)


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

"""``weft.weave``: spread a plain PyTorch training loop over processes by changing three lines.

The script stays a single-device script: every process runs it, sees the same whole batches, and
``engine.step`` trains on this process's part of each. Started alone it is a one-process run;
under torchrun, or any launcher that sets RANK and WORLD_SIZE, the processes join.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.api.distributed import WHOLE, membership_of, whole_spec
from weft.api.engine import (
    Parts,
    WovenEngine,
    leaves,
    mapped,
    num_samples,
    own,
    point_at_mains,
    refuse_batch_statistics,
    refuse_woven,
    set_exact,
)
from weft.api.objective import weighted_sum
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.config.axes import MODEL_AXES
from weft.config.errors import ConfigError
from weft.nn.context import Context
from weft.nn.stage import MicroBatch, Objective, Output, Stage, Tree, Unit, rows_of
from weft.optim.pytorch import TorchOptimizer
from weft.parallel.gradients import Gradients
from weft.plan.box import Box
from weft.plan.layout import Border
from weft.plan.mesh import Mesh
from weft.plan.model import ParamSpec, UnitName
from weft.plan.plan import PipelinePlan, Plan, Precision, Seat, StagePlan
from weft.plan.tiling import Tiling, split_evenly
from weft.planner.validate import refuse_idle_zero, validate_plan
from weft.platform.registry import platform_named
from weft.precision.registry import PRECISIONS
from weft.precision.roles import Roles
from weft.train.assemble import Options, Share, assemble

Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor]]
"""(model, batch) -> losses of any shape, not reduced; or (losses, weights) of the same shape."""


def weave(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: Loss | None = None,
    plan: Plan | Literal["auto"] = "auto",
    precision: Precision | None = None,
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
    if precision is not None and precision not in tuple(PRECISIONS):
        raise ConfigError("precision", precision, f"None or one of {tuple(PRECISIONS)}")
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
    precision: Precision | None = None
    max_grad_norm: float | None = None


def woven(
    model: nn.Module, optimizer: torch.optim.Optimizer, comm: Comm, settings: Settings
) -> WovenEngine:
    """An engine among the processes of ``comm``, for what ``weave`` has checked."""
    plan = settings.plan or _equal_parts(comm.world_size)
    source = _WovenSource(model, comm, settings)

    def pointed(gradients: Gradients) -> TorchOptimizer:
        set_exact(gradients, source.exact)
        point_at_mains(optimizer, gradients, source.trained.values())
        return TorchOptimizer(optimizer, gradients)

    options = Options(max_grad_norm=settings.max_grad_norm)
    built = assemble(plan, source, comm, pointed, options)

    def cut(batch: Any) -> list[MicroBatch]:
        parts = _parts(num_samples(batch), settings.plan, comm)
        return source.whole.cut(batch, parts)

    parts = Parts(cut, built.executor.evaluate, {0: model})
    result = WovenEngine(built.engine, built.optimizer, comm, parts)
    own(model, result)
    return result


def _equal_parts(world_size: int) -> Plan:
    """Every process computes one microbatch a step, of whatever size."""
    pipelines = tuple(
        PipelinePlan(
            stages=(StagePlan(mesh=Mesh.of((rank,), dp=1), layers=(0, 1)),), samples=1, microbatch=1
        )
        for rank in range(world_size)
    )
    return Plan(num_layers=1, pipelines=pipelines)


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
        if s or stage.mesh.model_axes:
            expected = f"one stage, without a {' or '.join(MODEL_AXES)} axis"
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
    plan: Plan, params: Collection[nn.Parameter], precision: Precision | None
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


class _WovenSource:
    """Somebody's module as something to assemble: one unit, whole on every process.

    It starts from rank 0's values.
    """

    may_be_absent = True
    buffers = ()

    def __init__(self, model: nn.Module, comm: Comm, settings: Settings) -> None:
        for tensor in [*model.parameters(), *model.buffers()]:
            comm.broadcast(tensor.detach(), src=0, name="initial values")
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.exact: dict[str, Tensor] = {}
        """Values before they were rounded to the precision asked for."""
        if settings.precision is not None:
            self.exact = {name: param.detach().clone() for name, param in self.trained.items()}
            model.to(PRECISIONS[settings.precision].parameters.dtype)
        self.whole = _Whole(model, settings.loss)
        self._world = comm.world

    @property
    def specs(self) -> list[ParamSpec]:
        return [whole_spec(name, param) for name, param in self.trained.items()]

    def tilings(self, _plan: Plan) -> dict[str, Tiling]:
        tilings = {}
        for spec in self.specs:
            whole = (Box.whole(spec.shape),)
            tilings[spec.name] = Tiling(spec.shape, dict.fromkeys(self._world, whole))
        return tilings

    def precision(self, _seat: Seat) -> Roles:
        dtypes = {param.dtype for param in self.trained.values()}
        return PRECISIONS["fp64" if torch.float64 in dtypes else "fp32"]

    def stage(self, _number: int, _share: Share) -> _Whole:
        return self.whole

    def split(self, stage: Stage, share: Share) -> None:
        """Nobody knows how to cut this module."""

    def objective(self, _last: Stage) -> Objective:
        return weighted_sum

    def borders(self, _pipeline: PipelinePlan) -> dict[int, Border]:
        return {}

    def expected_weight(self, _plan: Plan) -> float:
        return 1.0


class _Whole:
    """A module and the user's loss of it, as one stage of one unit."""

    spans_samples = False

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.module = model
        self.units: dict[UnitName, Unit] = {WHOLE: Unit(partial(loss, model))}
        self._nesting: Any = None
        """A batch without samples, of the form in which they come."""

    def cut(self, batch: Any, parts: Sequence[range]) -> list[MicroBatch]:
        """Some of the samples in each microbatch."""
        self._nesting = mapped(batch, lambda tensor: tensor[:0])
        tree = {str(number): tensor for number, tensor in enumerate(leaves(batch))}
        return [MicroBatch(rows_of(tree, slice(part.start, part.stop))) for part in parts]

    def compute(self, inputs: Tree, _context: Context, /) -> Output:
        """Losses, and weights where the user gives any."""
        tensors = iter(inputs.values())
        result = self.units[WHOLE](mapped(self._nesting, lambda _: next(tensors)))
        losses, weights = result if isinstance(result, tuple) else (result, None)
        if losses.ndim == 0:
            hint = 'Pass reduction="none": Weft takes the mean over the whole job.'
            raise ConfigError("loss", "a scalar", "losses that are not reduced", hint)
        return Output(
            {"losses": losses} if weights is None else {"losses": losses, "weights": weights}
        )


def _forward(model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
    result: Tensor | tuple[Tensor, Tensor] = (
        model(**batch) if isinstance(batch, Mapping) else model(*_as_tuple(batch))
    )
    return result


def _as_tuple(batch: Any) -> Sequence[Any]:
    return batch if isinstance(batch, tuple | list) else (batch,)

"""``weft.weave``: spread a plain PyTorch training loop over processes by changing three lines.

The script stays a single-device script: every process runs it, sees the same whole batches, and
``engine.step`` trains on this process's part of each. Started alone it is a one-process run;
under torchrun, or any launcher that sets RANK and WORLD_SIZE, the processes join.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.api.alike import Calls
from weft.api.distributed import WHOLE, membership_of, whole_spec
from weft.api.engine import (
    WovenEngine,
    assemble_own,
    in_dtype,
    join_with,
    leaves,
    mapped,
    num_samples,
    own,
    start_alike,
    weighted_sum,
)
from weft.api.refusals import (
    copies_of,
    losses_and_weights,
    refuse_batch_statistics,
    refuse_norm,
    refuse_odd_gradients,
    refuse_optimizer,
    refuse_sites,
    refuse_state,
    refuse_state_elsewhere,
    refuse_strangers,
    refuse_unfit,
    refuse_whole_rules,
)
from weft.api.scales import keep_scales
from weft.api.units import refuse_no_units
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.config.axes import INNER_AXES, NAMES
from weft.config.errors import ConfigError
from weft.nn.context import Context
from weft.nn.stage import MicroBatch, Output, Tree, Unit, rows_of
from weft.parallel.fp8.apply import eight_bits
from weft.parallel.fp8.history import Histories, is_delayed
from weft.plan.mesh import Mesh
from weft.plan.model import UnitName
from weft.plan.plan import PipelinePlan, Plan, Precision, StagePlan
from weft.plan.tiling import part_of
from weft.planner.validate import refuse_idle_zero, validate_plan
from weft.precision.registry import PRECISIONS
from weft.train.assemble import Source, whole_tilings

Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor]]
"""(model, batch) -> losses of any shape, not reduced; or (losses, weights) of the same shape."""


def weave(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: Loss | None = None,
    plan: Plan | Literal["auto"] = "auto",
    precision: Precision | None = None,
    emulate_fp8: bool = False,
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
        precision: Dtype of the model; None leaves it as it is. What numbers a batch has is left
            to the script: with "bf16" its loss casts them. With "fp8" it is bf16, and every
            ``nn.Linear`` in it multiplies in eight bits, with its parameters where they were; a
            subclass of ``nn.Linear`` does not.
        emulate_fp8: Round to eight bits and multiply as bf16 on accelerators without units for
            eight bits, which are refused otherwise; a processor always does.
        max_grad_norm: Clip gradients to this norm.

    Raises:
        ConfigError: something about the model, optimizer or plan cannot work.
    """
    address = RankAddress.from_environment() or RankAddress()
    _check(model, optimizer)
    refuse_norm(max_grad_norm)
    if precision is not None and precision not in tuple(PRECISIONS):
        raise ConfigError("precision", precision, f"None or one of {tuple(PRECISIONS)}")
    if isinstance(plan, Plan):
        _check_plan(plan, address.world_size)
        _refuse_unlike(plan, [*model.parameters()], precision)
    elif plan != "auto":
        raise ConfigError("plan", plan, '"auto" or a weft.plan.plan.Plan')
    pipelines = plan.pipelines if isinstance(plan, Plan) else ()
    if address.world_size > 1 or any(each.num_microbatches > 1 for each in pipelines):
        refuse_batch_statistics("model", model)
    return woven(
        model,
        optimizer,
        join_with(model, address),
        loss=loss or _forward,
        plan=None if plan == "auto" else plan,
        precision=precision,
        emulate_fp8=emulate_fp8,
        max_grad_norm=max_grad_norm,
    )


def woven(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    comm: Comm,
    *,
    loss: Loss,
    plan: Plan | None = None,
    precision: Precision | None = None,
    emulate_fp8: bool = False,
    max_grad_norm: float | None = None,
) -> WovenEngine:
    """An engine among the processes of ``comm``, for what ``weave`` has checked. Collective."""
    planned = plan or _equal_parts(comm.world_size, precision)
    settings = {"precision": precision, "max_grad_norm": max_grad_norm, "plan": str(planned)}
    settings["emulate_fp8"] = emulate_fp8
    start_alike(model, comm, **settings)
    refuse_no_units(planned, comm, asked=emulate_fp8)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    dims = {name: param.ndim for name, param in trained.items()}
    refuse_whole_rules(copies_of(optimizer, trained), dims, planned, comm.device)
    exact: dict[str, Tensor] = {}
    histories: Histories | None = None
    if precision is not None:
        exact = {name: param.detach().clone() for name, param in trained.items()}
        in_dtype(model, PRECISIONS[precision].parameters.dtype)
        histories = _in_eight_bits(model, planned, comm)
    dtypes = {param.dtype for param in trained.values()}
    whole = _Whole(model, loss)
    specs = [whole_spec(name, param) for name, param in trained.items()]
    source = Source(
        specs=specs,
        tilings=whole_tilings(specs, planned),
        precision=PRECISIONS["fp64" if torch.float64 in dtypes else "fp32"],
        stage=lambda _number, _share: whole,
        objective=lambda _last: weighted_sum,
        expected_weight=1.0,
        may_be_absent=True,
        histories=histories,
    )
    built = assemble_own(planned, source, comm, optimizer, exact=exact, max_grad_norm=max_grad_norm)

    def cut(batch: Any) -> list[MicroBatch]:
        tensors = leaves(batch)
        count = num_samples(tensors, plan)
        built.expect(float(count))  # what the model and its hooks see is of a mean
        if plan is None:
            parts = [part_of(count, comm.world_size, comm.rank)]
        else:
            parts = plan.rank_plan(comm.rank).microbatches()
        return whole.cut(batch, tensors, parts)

    result = WovenEngine(built, comm, cut, {0: model}, whole.calls)
    own(model, result)
    return result


def _in_eight_bits(model: nn.Module, plan: Plan, comm: Comm) -> Histories | None:
    """Replace linear layers inside a model where its precision asks for it; refuse one in which
    that changes nothing. Returns what their scales are made of, where those are delayed."""
    linears = {id(each.weight) for each in model.modules() if type(each) is nn.Linear}
    names = {id(param): name for name, param in model.named_parameters() if id(param) in linears}
    histories: Histories | None = None
    if is_delayed(plan):
        histories = Histories([*names.values()], plan.history, comm, margin=plan.margin)
    eight = eight_bits((), plan.rank_plan(comm.rank), comm, histories=histories, names=names)
    if eight is None:
        return None
    if type(model) is nn.Linear or nn.Linear not in map(type, model.modules()):
        hint = "One that is the whole model, or a subclass of it, is left alone."
        raise ConfigError("precision", "fp8", "a model with nn.Linear inside", hint)
    eight.apply(model)
    if histories is not None:
        keep_scales(model, histories)
    return histories


def _equal_parts(world_size: int, precision: Precision | None) -> Plan:
    """Every process computes one microbatch a step, of whatever size.

    ``precision`` None: the numbers are the model's own.
    """
    computed = precision or "fp32"
    pipelines = tuple(
        PipelinePlan(
            stages=(
                StagePlan(
                    mesh=Mesh.of((rank,), **{NAMES[0]: 1}), layers=(0, 1), precision=computed
                ),
            ),
            samples=1,
            microbatch=1,
        )
        for rank in range(world_size)
    )
    return Plan(num_layers=1, pipelines=pipelines)


def _check(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    refuse_unfit(model)
    refuse_odd_gradients("model", model)
    if any(membership_of(module) is not None for module in model.modules()):
        hint = "The engine adds up gradients itself."
        value = "from weft.distributed_model"
        raise ConfigError("model", value, "a model that has not joined a job", hint)
    refuse_strangers(optimizer, model)
    refuse_optimizer(optimizer)
    refuse_state(optimizer)


def _check_plan(plan: Plan, world_size: int) -> None:
    """Only samples can be divided: a module that Weft does not know cannot be cut."""
    validate_plan(plan, num_layers=plan.num_layers, global_batch=plan.global_batch)
    if plan.world_size != world_size:
        raise ConfigError("plan", f"{plan.world_size} ranks", f"{world_size} ranks")
    refuse_sites(plan)
    refuse_state_elsewhere(plan)
    for p, s, stage in plan.stages():
        if s or stage.mesh.inner_axes:
            expected = f"one stage, none of whose axes is {' or '.join(INNER_AXES)}"
            raise ConfigError(f"plan.pipelines[{p}]", "a model that is cut", expected)
        if stage.zero == 3:
            hint = "Weft does not know when this module needs which of its parameters."
            raise ConfigError(f"plan.pipelines[{p}].stages[{s}].zero", 3, "2 at most", hint)
        if stage.passes > 1:
            hint = "A smaller micro-batch does the same here."
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
    dtypes = {param.dtype for param in params if param.is_floating_point()}
    products = None
    if precision is not None:
        dtypes = {PRECISIONS[precision].compute.dtype}
        products = PRECISIONS[precision].products
    for p, s, stage in plan.stages():
        where = f"plan.pipelines[{p}].stages[{s}]"
        if [stage.device] != devices:
            expected = f"that of the model ({', '.join(devices)})"
            raise ConfigError(f"{where}.device", stage.device, expected)
        asked = PRECISIONS[stage.precision]
        if {asked.compute.dtype} != dtypes or asked.products != products:
            hint = "Give weave the same precision as the plan."
            expected = f"that of the model ({', '.join(sorted(map(str, dtypes)))})"
            raise ConfigError(f"{where}.precision", stage.precision, expected, hint)


class _Whole:
    """A module and the user's loss of it, as one stage of one unit."""

    spans_samples = False

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.module = model
        self.units: dict[UnitName, Unit] = {WHOLE: Unit(self._call)}
        self.calls = Calls()
        """Of it, as layer 0."""
        self._loss = loss
        self._nesting: Any = None
        """A batch without samples, of the form in which they come."""

    def cut(
        self, batch: Any, tensors: Sequence[Tensor], parts: Sequence[range]
    ) -> list[MicroBatch]:
        """Some of the samples in each microbatch. ``tensors``: the batch's leaves."""
        self._nesting = mapped(batch, lambda tensor: tensor[:0])
        tree = {str(number): tensor for number, tensor in enumerate(tensors)}
        return [MicroBatch(rows_of(tree, slice(part.start, part.stop))) for part in parts]

    def compute(self, inputs: Tree, _context: Context, /) -> Output:
        """Losses, and weights where the user gives any."""
        tensors = iter(inputs.values())
        result = self.units[WHOLE](mapped(self._nesting, lambda _: next(tensors)))
        losses, weights = losses_and_weights(result)
        return Output(
            {"losses": losses} if weights is None else {"losses": losses, "weights": weights}
        )

    def _call(self, batch: Any) -> Any:
        with self.calls.of(0, self.module):
            return self._loss(self.module, batch)


def _forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)

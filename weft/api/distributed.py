"""Keep a plain loop: ``backward``, ``step``, ``zero_grad``, each process with data of its own.

The model and the optimizer stay the objects they are. A hook before ``step`` adds up the gradients
of all processes, each counted as much as its loss, and puts the mean in their place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from weft.api.alike import Calls, refuse_unlike_settings, refuse_unlike_values
from weft.api.engine import join_with, start_alike
from weft.api.refusals import (
    number_of,
    refuse_batch_statistics,
    refuse_norm,
    refuse_odd_gradients,
    refuse_strangers,
    refuse_unfit,
    refuse_unlike,
)
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.config.errors import ConfigError
from weft.optim.pytorch import TorchOptimizer
from weft.parallel.gradients import refuse_sparse
from weft.parallel.params import Held, LocalParam
from weft.plan.model import Init, ParamSpec, UnitName
from weft.plan.tiling import Stored
from weft.precision.registry import PRECISIONS
from weft.train.assemble import gradient_path
from weft.train.engine import Engine

Unweighted = Literal["refuse", "equal"]


def distributed_model(model: nn.Module) -> nn.Module:
    """Join the job and give the model rank 0's values. Returns the model itself.

    A second call changes nothing.

    Raises:
        ConfigError: the model cannot be trained on parts of a batch.
    """
    if membership_of(model) is not None:
        return model
    address = RankAddress.from_environment() or RankAddress()
    refuse_unfit(model)
    return join_model(model, join_with(model, address))


def join_model(model: nn.Module, comm: Comm) -> nn.Module:
    """What ``distributed_model`` does, among the processes of ``comm``."""
    if comm.world_size > 1:
        refuse_batch_statistics("model", model)
        refuse_odd_gradients("model", model)
    start_alike(model, comm)
    membership = _Membership(comm)
    model.register_forward_pre_hook(membership, with_kwargs=True)
    if comm.world_size > 1:
        model.register_forward_hook(membership.after)
    return model


def distributed_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    *,
    unweighted: Unweighted = "refuse",
    max_grad_norm: float | None = None,
) -> torch.optim.Optimizer:
    """Let ``optimizer.step(weight=n)`` use the gradients of all processes. Returns the optimizer.

    ``n`` is what this process's loss is the mean over: samples, or tokens. A second call changes
    nothing. On one process the optimizer does what it always did.

    Args:
        optimizer: Any over parameters of ``model``; it updates whole parameters on each process.
        model: What ``distributed_model`` returned.
        unweighted: What ``step()`` without a weight means on several processes: it is refused,
            or all count the same, which is checked by the samples that the model was given.
        max_grad_norm: Clip the gradients of this optimizer's parameters, over the whole job, to
            this norm. With several optimizers each clips its own.

    Raises:
        ConfigError: here, the model or optimizer cannot work so; in ``step``, it has no weight,
            gradients were changed after ``backward``, or the optimizer updates what it did not
            when it was wrapped.
    """
    refuse_norm(max_grad_norm)
    if any(isinstance(h, _Reduction) for h in optimizer._optimizer_step_pre_hooks.values()):
        return optimizer
    if unweighted not in get_args(Unweighted):
        raise ConfigError("unweighted", unweighted, f"one of {get_args(Unweighted)}")
    membership = membership_of(model)
    if membership is None:
        expected = "what weft.distributed_model returned"
        raise ConfigError("model", type(model).__name__, expected)
    refuse_strangers(optimizer, model)
    updated = {param for group in optimizer.param_groups for param in group["params"]}
    params = {n: p for n, p in model.named_parameters() if p in updated and p.requires_grad}
    reduction = _Reduction(membership, model, params, unweighted, max_grad_norm)
    optimizer.register_step_pre_hook(reduction)
    return optimizer


def membership_of(model: nn.Module) -> _Membership | None:
    """The job that a model has joined."""
    hooks = model._forward_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, _Membership)), None)


WHOLE: UnitName = "embed"
"""The unit that a whole module is."""


class _Membership:
    """A model's job; before each forward it counts the samples that training is done on."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.num_samples = 0
        """Ever."""
        self.calls = Calls()
        self._before: dict[str, tuple[Tensor, int]] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._before = self.calls.look(0, module)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim]
        if tensors and torch.is_grad_enabled():
            self.num_samples += len(tensors[0])

    def after(self, *_of_forward: object) -> None:
        """Of parameters that it wrote."""
        self.calls.note(self._before)


@dataclass(eq=False)
class _Reduction:
    """Before an update: the mean gradient over all processes, in place of this one's."""

    _membership: _Membership
    _model: nn.Module
    _params: dict[str, nn.Parameter]
    """What is added up: those that were trained when the optimizer was wrapped."""
    _unweighted: Unweighted
    _max_grad_norm: float | None

    def __post_init__(self) -> None:
        self._seen: dict[Tensor, tuple[int, int]] = {}
        self._known = {id(param) for param in self._params.values()}
        self._num_steps = 0
        self._num_before = self._membership.num_samples
        """Samples that the model was given up to the last step of this optimizer."""
        comm, params = self._membership.comm, self._params
        dtypes = {param.dtype for param in params.values()}
        roles = PRECISIONS["fp64" if torch.float64 in dtypes else "fp32"]
        main = roles.master.dtype
        self._places = {
            # Gradients go by a parameter without memory: autograd never meets it.
            name: nn.Parameter(torch.zeros((), dtype=main, device=comm.device).expand(p.shape))
            for name, p in params.items()
        }
        local = [
            LocalParam(whole_spec(n, p), Stored.whole(p.shape), p) for n, p in self._places.items()
        ]
        pieces = {
            p.spec.name: [Held(p.spec, box, comm.world) for box in p.stored.boxes] for p in local
        }
        self._gradients = gradient_path(local, pieces, comm, precision=roles)
        self._sums = {main.spec.name: main for main in self._gradients.mains}
        nothing = torch.optim.SGD([torch.zeros(0)])  # the user's own comes after
        self._engine: Engine[float] = Engine(
            self._add, self._gradients, TorchOptimizer(nothing, self._gradients), comm,
            max_grad_norm=self._max_grad_norm,
        )  # fmt: skip
        note = WeakMethod(self._note)  # a parameter's hook is never collected with what it holds

        def seen(param: Tensor) -> None:
            live = note()
            if live is not None:
                live(param)

        for param in params.values():
            param.register_post_accumulate_grad_hook(seen)  # type: ignore[no-untyped-call]

    def __call__(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        weight = kwargs.get("weight")
        rest = {key: value for key, value in kwargs.items() if key != "weight"}
        if weight is not None:
            key, expected = "optimizer.step(weight=)", "a finite number, 0 or more"
            weight = number_of(key, float(weight), expected)
        is_shared = self._membership.comm.world_size > 1
        if is_shared or self._max_grad_norm is not None:
            self._refuse_new(optimizer)
        if is_shared:
            if args[1:] or rest.get("closure") is not None:
                hint = "Compute the loss and call backward before step."
                raise ConfigError("optimizer.step(closure=)", "a function", "none", hint)
            self._compare(optimizer)
            self._reduce(weight)
        elif self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._params.values(), self._max_grad_norm)
        self._num_before = self._membership.num_samples
        return args, rest

    def _refuse_new(self, optimizer: torch.optim.Optimizer) -> None:
        """What was unfrozen or added since would be updated by this process's gradient alone."""
        for param in (each for group in optimizer.param_groups for each in group["params"]):
            if param.requires_grad and id(param) not in self._known:
                names = (name for name, each in self._model.named_parameters() if each is param)
                name = next(names, f"a tensor of shape {list(param.shape)}")
                expected = "what was trained when weft.distributed_optimizer was called"
                hint = "Freeze it after that call, not before; or give what is added an optimizer "
                hint += "of its own, wrapped too."
                raise ConfigError("optimizer", name, expected, hint)

    def _compare(self, optimizer: torch.optim.Optimizer) -> None:
        """The 1st, 2nd, 4th, 8th ... step is made with the same settings on every process; the
        first from the same values."""
        self._num_steps += 1
        comm = self._membership.comm
        if self._num_steps == 1:
            settings = {"max_grad_norm": self._max_grad_norm, "unweighted": self._unweighted}
            refuse_unlike(comm, settings)
            self._membership.calls.refuse_writes(comm)
            self._membership.calls.notes = False
            refuse_unlike_values(self._params.items(), comm)
        if self._num_steps.bit_count() == 1:
            names = {id(param): name for name, param in self._params.items()}
            refuse_unlike_settings(optimizer, names, comm)

    @torch.no_grad()
    def _reduce(self, weight: float | None) -> None:
        if weight is None and self._unweighted == "refuse":
            expected = "what this process's loss is the mean over, e.g. its number of samples"
            hint = 'Parts that are always equal: weft.distributed_optimizer(unweighted="equal").'
            raise ConfigError("optimizer.step(weight=)", None, expected, hint)
        self._refuse_changed()
        is_used = self._agree(is_equal=weight is None)
        _, factor = self._engine.backward(1.0 if weight is None else weight)
        self._gradients.scale(factor)
        is_empty = float(factor) == 0.0
        for (name, param), used in zip(self._params.items(), is_used, strict=True):
            if is_empty or not used:
                param.grad = None
                continue
            total = self._sums[name].grad
            assert total is not None, name
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(total)
            self._note(param)

    def _add(self, weight: float) -> Tensor:
        """Start to add up gradients; the sums of an engine, of which the loss is not known."""
        present = {n: p.grad for n, p in self._params.items() if p.grad is not None}
        self._gradients.begin(int(bool(present)))
        for name, grad in reversed(present.items()):
            place = self._places[name]
            part = grad.to(place.dtype) * weight
            self._gradients.add(place, part if weight else torch.zeros_like(part))  # NaN, maybe
        device = self._membership.comm.device
        return torch.tensor([0.0, weight], dtype=torch.float64, device=device)

    def _agree(self, *, is_equal: bool) -> list[bool]:
        """Which parameters have a gradient on any process; equal parts are checked to be so."""
        comm, count = self._membership.comm, self._membership.num_samples - self._num_before
        facts = [float(param.grad is not None) for param in self._params.values()]
        table = torch.tensor([*facts, count, count**2], dtype=torch.float64, device=comm.device)
        comm.all_reduce(table, name="parts of a step")
        *used, counts, squares = table.tolist()
        if is_equal and (counts**2 != squares * comm.world_size or not counts):
            value = f"{count} samples here, {counts:g} in all"
            hint = "Say how much each process's loss counts: optimizer.step(weight=n)."
            raise ConfigError("optimizer.step()", value, "equal parts on every process", hint)
        return [bool(number) for number in used]

    def _note(self, param: Tensor) -> None:
        """Remember a gradient as ``backward`` or the last update left it, without holding it."""
        if self._membership.comm.world_size == 1:
            return  # nothing of it is added up
        if param.grad is not None and param.grad.layout != torch.strided:
            refuse_sparse(next(n for n, p in self._params.items() if p is param), param.grad)
        self._seen[param] = _state(param)

    def _refuse_changed(self) -> None:
        """What clips or scales before this reduction would act on a part of the job."""
        for name, param in self._params.items():
            if param.grad is None or self._seen.get(param) == _state(param):
                continue
            if bool(param.grad.any()):  # zeros count for nothing, whoever wrote them
                expected = "the gradient that backward left"
                hint = "To clip, give weft.distributed_optimizer a max_grad_norm."
                raise ConfigError(f"{name}.grad", "changed before step", expected, hint)


def _state(param: Tensor) -> tuple[int, int]:
    """Where a gradient is, and how often it was written."""
    assert param.grad is not None
    return param.grad.data_ptr(), param.grad._version


def whole_spec(name: str, param: nn.Parameter) -> ParamSpec:
    """A parameter of a module that is one unit, and has no layers."""
    shape = tuple(param.shape)
    return ParamSpec(name=name, shape=shape, unit=WHOLE, init=Init("zeros"), decay=False)

"""The engine behind ``weave`` and ``weave_layers``: one call trains on one global batch."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from weft.api.alike import Calls, Kept, named, refuse_unlike_settings, refuse_unlike_values
from weft.api.groups import Groups
from weft.api.owned import Owned
from weft.api.refusals import (
    facts_of,
    number_of,
    refuse_no_grad,
    refuse_odd_weights,
    refuse_other_state,
    refuse_schedule,
    refuse_state,
    refuse_unlike,
    refuse_unlike_batches,
    refuse_weight,
)
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.config.errors import ConfigError
from weft.nn.stage import MicroBatch, Term, Terms, Tree
from weft.optim.pytorch import TorchOptimizer, load_state, set_lr
from weft.parallel.gradients import Gradients
from weft.parallel.mains import MainParam
from weft.plan.plan import Plan
from weft.platform.registry import platform_named
from weft.train.assemble import Assembled, Source, assemble
from weft.train.engine import StepResult


def assemble_own(
    plan: Plan,
    source: Source,
    comm: Comm,
    optimizer: torch.optim.Optimizer,
    *,
    exact: Mapping[str, Tensor],
    max_grad_norm: float | None,
) -> Assembled[TorchOptimizer]:
    """A rank with modules and an optimizer of the user's own. Collective.

    ``exact``: whole values of parameters that were rounded to the model's precision, before that.
    """

    def pointed(gradients: Gradients) -> TorchOptimizer:
        with torch.no_grad():
            for main in gradients.mains:
                if main.spec.name in exact:
                    main.value.copy_(exact[main.spec.name][main.box.slices()])
        if not {id(main.value) for main in gradients.mains}.issuperset(map(id, optimizer.state)):
            refuse_state(optimizer)
        return TorchOptimizer(optimizer, gradients)

    return assemble(plan, source, comm, pointed, max_grad_norm=max_grad_norm)


class WovenEngine:
    """What ``weave`` and ``weave_layers`` return.

    A batch is the whole global batch, the same on every process, with samples along the first
    dimension of each tensor. Every method that takes one is collective.
    """

    def __init__(
        self,
        built: Assembled[TorchOptimizer],
        comm: Comm,
        cut: Callable[[Any], list[MicroBatch]],
        layers: Mapping[int, nn.Module],
        calls: Calls,
    ) -> None:
        """``calls``: of the layers."""
        self._built = built
        self._comm = comm
        self._cut = cut
        self.layers = layers
        """Those that this process holds, by number; a whole model is number 0."""
        self._calls = calls
        self._outside = _Outside(built.gradients, layers.values())
        trained = ((name, param) for name, param in named(layers) if param.requires_grad)
        self._groups = Groups(self.optimizer, built.gradients.mains, trained)
        self._names = {id(main.value): main.spec.name for main in built.gradients.mains}
        """Of what the optimizer updates."""
        self._num_batches = 0
        """That were taken, those of evaluations among them."""
        self._unfinished = ""
        """The call that is under way, or ended in an error."""
        self.last: StepResult | None = None
        """Loss, weight and gradient norm of the last step, over the whole job."""

    @property
    def rank(self) -> int:
        """Number of this process; rank 0 is the one that should print and save."""
        return self._comm.rank

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What updates the parameters, or the part of them that this process updates."""
        return self._built.optimizer.optimizer

    def step(self, batch: Any) -> Tensor:
        """Forward, backward, reduce, clip, update on this process's part of ``batch``.

        The result is the mean loss over the whole job's weighted elements, a scalar. Parameters
        are up to date on every process that holds them.

        Raises:
            ConfigError: the batch has no samples, not as many as the plan says, or weights that add
                up to less than 0; processes have unlike batches, parameters or settings; the model
                has trained parameters that it did not have before, or buffers that its forward
                writes several times a step (micro-batches, passes, recomputing) or by the samples
                of one process; a call before ended in an error, and there are other processes. The
                parameters are what they were.
        """
        refuse_no_grad("engine.step")
        self._begin("step")
        self._outside.take_in()
        self._groups.take_in()
        mine = self._take(batch)
        kept = None
        if self.last is None:
            self._calls.begin()
            self._calls.refuse_writes(self._comm, alone=self._is_updated)  # of evaluations
            refuse_unlike_values(named(self.layers), self._comm)
            kept = Kept(self.layers, self._calls)
        engine = self._built.engine
        result, factor = engine.backward(mine)
        if kept is not None:
            kept.refuse_odd(self._comm)
            self._calls.refuse_writes(self._comm, alone=self._is_updated)
            self._calls.notes = False
        self.last = result
        refuse_weight(self.last.weight)
        engine.update(factor, self.last.weight)
        self._built.gradients.fence()
        self._unfinished = ""
        return self.last.loss

    def train_batch(self, batch: Any, lr: float | LRScheduler | None = None) -> Tensor:
        """``step`` with the learning rate: a number to use now, or a schedule to step after.

        Raises:
            ConfigError: besides, no such rate, or a schedule that asks for more than to be stepped.
        """
        if isinstance(lr, LRScheduler):
            refuse_schedule(lr, self.optimizer)
        elif lr is not None:
            set_lr(self.optimizer, number_of("lr", lr, "a finite number >= 0, or a schedule"))
        loss = self.step(batch)
        if isinstance(lr, LRScheduler):
            lr.step()
        return loss

    def eval_batch(self, batch: Any) -> Tensor:
        """The mean loss of a batch, without gradients, with every module in evaluation mode; 0
        where all weights are 0."""
        self._begin("eval_batch")
        with torch.no_grad(), _evaluating(self.layers.values()):
            totals = self._built.executor.evaluate(self._take(batch)).clone()
        self._comm.all_reduce(totals, name="evaluation totals")
        refuse_weight(totals[1])
        self._unfinished = ""
        return torch.where(totals[1] > 0, totals[0] / totals[1], 0.0)

    def state_dict(self) -> dict[str, Any]:
        """What this process needs, beside the state dicts of its layers, to go on to the bit.

        ``optimizer`` is that of ``engine.optimizer``, and ``places`` the parts of parameters that
        this process updates; ``exact`` has the values of those that the model has rounded (bf16,
        fp8), and ``loss_scale`` says by what the loss is scaled (fp16). Like that of a module, it
        holds the tensors themselves. Each process saves its own.
        """
        self._outside.take_in()
        self._groups.take_in()
        scale = self._built.engine.loss_scale
        return {
            "optimizer": self.optimizer.state_dict(),
            "places": self._outside.places,
            "exact": self._outside.exact(),
            "loss_scale": {} if scale is None else scale.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave on the same process of the same plan; before or after
        the layers load theirs.

        Raises:
            ConfigError: it is of another model, plan, precision or optimizer. Nothing was changed
                then.
        """
        self._groups.take_in()
        scale, own = self._built.engine.loss_scale, self._outside
        refuse_other_state(state, own.places, own.exact(), scales=scale is not None)
        load_state(self.optimizer, state["optimizer"])
        own.restore(state["exact"])
        if scale is not None:
            scale.restore(**state["loss_scale"])

    def _is_updated(self, param: Tensor) -> bool:
        """By the optimizer, itself, where others are from copies."""
        return id(param) in self._names

    def _begin(self, call: str) -> None:
        """Raises ConfigError: the call before did not end, here, and there are other processes.
        They may still be in it: what this one sends now they would take for a part of that."""
        if self._unfinished and self._comm.world_size > 1:
            expected = "calls that end on every process, or a new start"
            hint = "Others may still wait in it. End all processes, and go on from what was saved."
            raise ConfigError(f"engine.{self._unfinished}", "ended in an error", expected, hint)
        self._unfinished = call

    def _take(self, batch: Any) -> list[MicroBatch]:
        """This process's part. The 1st, 2nd, 4th, 8th ... batch is compared with the others', and
        with what settings it is trained on."""
        self._num_batches += 1
        if self._comm.world_size > 1 and self._num_batches.bit_count() == 1:
            refuse_unlike_batches(f"engine.{self._unfinished}", leaves(batch), self._comm)
            refuse_unlike_settings(self.optimizer, self._names, self._comm)
        return self._cut(batch)


def own(model: nn.Module, engine: WovenEngine) -> None:
    """Let a model keep its engine alive: gradients come to it even where nobody else holds it."""
    vars(model)["_weft"] = Owned(engine)


class _Outside:
    """What the user does to parameters between steps, where the optimizer updates others or other
    processes read them where they were. PyTorch counts no writes through ``Tensor.data``, so values
    are compared."""

    def __init__(self, gradients: Gradients, roots: Iterable[nn.Module]) -> None:
        self._roots = list(roots)
        named = [pair for root in self._roots for pair in root.named_parameters()]
        self._memory = {id(p): p.detach() for _, p in named if p.requires_grad}
        """Of each parameter that is trained, what is computed with and sent."""
        self._mains = [main for main in gradients.mains if main.value is not main.param]
        self._rounded = [m for m in self._mains if m.value.dtype != m.param.dtype]
        self.places = [_place_of(main) for main in gradients.mains]
        """What this process updates."""

    def exact(self) -> dict[str, Tensor]:
        """What the optimizer updates of parameters that are rounded, by name and place."""
        return {_place_of(main): main.value for main in self._rounded}

    @torch.no_grad()
    def restore(self, exact: Mapping[str, Tensor]) -> None:
        """Go on from these, which are in the model too, in its precision."""
        for main in self._rounded:
            main.value.copy_(exact[_place_of(main)])
            main.param.detach()[main.box.slices()].copy_(main.value)

    @torch.no_grad()
    def take_in(self) -> None:
        """Bring what was written to what the optimizer updates; the rest keeps its precision."""
        self._put_back()
        given = [main.param.detach()[main.box.slices()] for main in self._mains]
        both = [(g, m.value) for g, m in zip(given, self._mains, strict=True)]
        apart = [(g, value) for g, value in both if g.data_ptr() != value.data_ptr()]
        if apart and _differ([g for g, _ in apart], [value for _, value in apart]):
            for written, value in apart:
                kept = written == value.to(written.dtype)
                value.copy_(torch.where(kept, value, written.to(value.dtype)))

    def _put_back(self) -> None:
        """Parameters in the memory that they had when their model was woven.

        Raises:
            ConfigError: one was not trained then, or has become another.
        """
        for name, param in (pair for root in self._roots for pair in root.named_parameters()):
            memory = self._memory.get(id(param))
            if memory is not None:
                _with_own_memory(name, param, memory)
            elif param.requires_grad:
                expected = "a parameter that was trained when its model was woven"
                hint = "Load values with assign=False; freeze parameters after weaving, not before."
                raise ConfigError("model", name, expected, hint)


def _differ(given: list[Tensor], values: list[Tensor]) -> bool:
    """Whether any of these is not what a value is rounded to. Waits for the device."""
    rounded = [torch.empty_like(each) for each in given]
    torch._foreach_copy_(rounded, values)
    torch._foreach_sub_(rounded, given)
    return bool(torch.stack(torch._foreach_norm(rounded, float("inf"))).amax() != 0)


def _with_own_memory(name: str, param: nn.Parameter, memory: Tensor) -> None:
    """A parameter that was given other memory, as ``param.data = values`` does, has its own again,
    with the values that it was given."""
    if param.data_ptr() == memory.data_ptr():
        return
    given, own = ((each.dtype, each.device, tuple(each.shape)) for each in (param, memory))
    if given != own:
        expected = f"{', '.join(map(str, own))}, as when its model was woven"
        raise ConfigError(f"model: {name}", ", ".join(map(str, given)), expected)
    memory.copy_(param.detach())
    param.data = memory


def _place_of(main: MainParam) -> str:
    """The name of its parameter, and which part of that it is."""
    slices = ", ".join(f"{each.start}:{each.stop}" for each in main.box.slices())
    return f"{main.spec.name}[{slices}]"


@contextmanager
def _evaluating(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Modules that drop or count do not; afterwards each is as it was."""
    modes = {module: module.training for root in roots for module in root.modules()}
    for module in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def join_with(model: nn.Module, address: RankAddress) -> Comm:
    """Join the job on the kind of device that the model is on; the model moves to this rank's."""
    platform = platform_named(next(model.parameters()).device.type)
    device = platform.device(address.local_rank)
    comm = join(address, device=device, **platform.joining())
    close_at_exit(comm)
    model.to(device)
    return comm


def close_at_exit(comm: Comm) -> None:
    """Leave the job when Python ends: at once, and waiting for no peer, where an error ends it."""
    atexit.register(lambda: comm.close(abort=hasattr(sys, "last_value")))


@torch.no_grad()
def start_alike(model: nn.Module, comm: Comm, **settings: object) -> None:
    """Give the model rank 0's values. Collective. ``settings``: what else must be the same."""
    refuse_unlike(comm, {**facts_of(model), **settings})
    for tensor in [*model.parameters(), *model.buffers()]:
        flat = tensor.detach().contiguous()
        comm.broadcast(flat.view(-1).view(torch.uint8), src=0, name="initial values")
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat)


def in_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Give a module's numbers a dtype; complex ones stay as they are."""
    module._apply(lambda x: x.to(dtype) if x.is_floating_point() else x)  # type: ignore[no-untyped-call]


def weighted_sum(output: Tree, _batch: Tree, /) -> Terms:
    """``losses`` of any shape, with ``weights`` of the same or, without any, all counting one."""
    losses, weights = output["losses"], output.get("weights")
    if weights is None:
        count = torch.full((), losses.numel(), dtype=torch.float64, device=losses.device)
        return {"loss": Term(losses.sum(), count)}
    refuse_odd_weights(losses, weights)
    return {"loss": Term((losses * weights).sum(), weights.sum(dtype=torch.float64))}


def num_samples(tensors: Sequence[Tensor], plan: Plan | None) -> int:
    """Samples of a batch of these ``leaves``; as many as the plan says where there is one."""
    sizes = {len(tensor) for tensor in tensors}
    if len(sizes) != 1 or 0 in sizes:
        expected = "tensors with the same number of samples, at least one, along dimension 0"
        raise ConfigError("batch", sorted(sizes), expected)
    (count,) = sizes
    if plan is not None and count != plan.global_batch:
        expected = f"{plan.global_batch} samples, as in the plan"
        raise ConfigError("batch", f"{count} samples", expected)
    return count


def leaves(batch: Any) -> list[Tensor]:
    """The tensors of a batch, each with samples, which is one, or a tuple, list or mapping of
    batches; in the order in which ``mapped`` meets them."""
    if isinstance(batch, Tensor) and batch.ndim:
        return [batch]
    if not isinstance(batch, Mapping | tuple | list):
        value = "a scalar" if isinstance(batch, Tensor) else type(batch).__name__
        expected = "tensors with samples along dimension 0, in tuples, lists or mappings"
        raise ConfigError("batch", value, expected)
    parts = batch.values() if isinstance(batch, Mapping) else batch
    return [leaf for part in parts for leaf in leaves(part)]


def mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What ``change`` makes of every tensor of a batch, in the same nesting."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: mapped(value, change) for key, value in batch.items()}
    values = [mapped(value, change) for value in batch]
    if "_fields" in dir(type(batch)):  # a named tuple
        return type(batch)(*values)
    return values if isinstance(batch, list) else tuple(values)

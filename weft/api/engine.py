"""The engine behind ``weave`` and ``weave_layers``: one call trains on one global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from weft.comm.comm import Comm
from weft.config.errors import ConfigError
from weft.optim.pytorch import TorchOptimizer, set_lr
from weft.parallel.gradients import Gradients, takes_gradients_of
from weft.train.engine import Engine, StepResult

Cut = Callable[[Any], Any]
"""A global batch -> what this process computes of it, as its engine takes it."""


@dataclass(frozen=True, slots=True)
class Parts:
    """How a model computes."""

    cut: Cut
    evaluate: Callable[[Any], Tensor]
    """Forwards alone of what ``cut`` gave: this process's sums ``[loss, weight]``, fp64."""
    modules: Mapping[int, nn.Module]
    """This process's layers by number; a model that is no list of layers is number 0."""


class WovenEngine:
    """What ``weave`` and ``weave_layers`` return.

    A batch is the whole global batch, the same on every process, with samples along the first
    dimension of each tensor. Every method that takes one is collective.
    """

    def __init__(
        self, engine: Engine[Any], optimizer: TorchOptimizer, comm: Comm, parts: Parts
    ) -> None:
        self._engine = engine
        self._optimizer = optimizer.optimizer
        self._comm = comm
        self._parts = parts
        self._outside = _Outside(engine.gradients, parts.modules.values())
        self.last: StepResult | None = None
        """Loss, weight and gradient norm of the last step, over the whole job."""

    @property
    def rank(self) -> int:
        """Number of this process; rank 0 is the one that should print and save."""
        return self._comm.rank

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What updates the parameters, or the part of them that this process updates."""
        return self._optimizer

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """The layers that this process holds, by number; a whole model is number 0."""
        return self._parts.modules

    def step(self, batch: Any) -> Tensor:
        """Forward, backward, reduce, clip, update on this process's part of ``batch``.

        The result is the mean loss over the whole job's weighted elements, a scalar. Parameters
        are up to date on every process that holds them.

        Raises:
            ConfigError: the batch has no samples, or not as many as the plan says; the model has
                trained parameters that it did not have before.
        """
        mine = self._parts.cut(batch)
        self._outside.take_in()
        self.last = self._engine.step(mine)
        self._engine.gradients.fence()
        self._outside.note()
        return self.last.loss

    def train_batch(self, batch: Any, lr: float | LRScheduler | None = None) -> Tensor:
        """``step`` with the learning rate: a number to use now, or a schedule to step after."""
        if isinstance(lr, LRScheduler):
            if lr.optimizer is not self.optimizer:
                raise ConfigError("lr", type(lr).__name__, "a schedule of engine.optimizer")
        elif lr is not None:
            set_lr(self.optimizer, lr)
        loss = self.step(batch)
        if isinstance(lr, LRScheduler):
            lr.step()
        return loss

    def eval_batch(self, batch: Any) -> Tensor:
        """The mean loss of a batch, without gradients, with every module in evaluation mode."""
        with torch.no_grad(), _evaluating(self._parts.modules.values()):
            totals = self._parts.evaluate(self._parts.cut(batch)).clone()
        self._comm.all_reduce(totals, name="evaluation totals")
        return torch.where(totals[1] > 0, totals[0] / totals[1], 0.0)


class _Owned:
    """A model's engine, which lives as long as the model. A copy of the model has none."""

    def __init__(self, engine: WovenEngine | None) -> None:
        self.engine = engine

    def __deepcopy__(self, _memo: dict[int, Any]) -> _Owned:
        return _Owned(None)

    def __reduce__(self) -> tuple[type[_Owned], tuple[None]]:
        return _Owned, (None,)


def own(model: nn.Module, engine: WovenEngine) -> None:
    """Let a model keep its engine alive: gradients come to it even where nobody else holds it."""
    vars(model)["_weft"] = _Owned(engine)


class _Outside:
    """What the user does to parameters between steps, where the optimizer updates others."""

    def __init__(self, gradients: Gradients, roots: Iterable[nn.Module]) -> None:
        self._roots = list(roots)
        self._known = {id(p) for root in self._roots for p in root.parameters() if p.requires_grad}
        self._mains = [main for main in gradients.mains if main.value is not main.param]
        self.note()

    def note(self) -> None:
        """Whatever is written from now on, ``load_state_dict`` for one, is the user's."""
        self._versions = [main.param._version for main in self._mains]

    @torch.no_grad()
    def take_in(self) -> None:
        """Bring what was written to what the optimizer updates; the rest keeps its precision."""
        for name, param in (pair for root in self._roots for pair in root.named_parameters()):
            if param.requires_grad and id(param) not in self._known:
                expected = "a parameter that was trained when its model was woven"
                hint = "Load values with assign=False; freeze parameters after weaving, not before."
                raise ConfigError("model", name, expected, hint)
        for main, version in zip(self._mains, self._versions, strict=True):
            if main.param._version != version:
                given = main.param.detach()[main.box.slices()]
                kept = given == main.value.to(given.dtype)
                main.value.copy_(torch.where(kept, main.value, given.to(main.value.dtype)))


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


def refuse_batch_statistics(where: str, model: nn.Module) -> None:
    """Batch normalization would make a sample's result depend on who computes it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            expected = "a module that treats samples independently"
            hint = "Use GroupNorm or LayerNorm: batch statistics would depend on the split."
            key = f"{where}.{name}" if name else where
            raise ConfigError(key, type(module).__name__, expected, hint)


def refuse_woven(where: str, model: nn.Module) -> None:
    """Gradients that are taken away once would never come to a second engine."""
    for name, param in model.named_parameters():
        if takes_gradients_of(param):
            expected = "a model that was not woven before"
            hint = "Go on with the engine that it has, or weave a copy (copy.deepcopy)."
            raise ConfigError(f"{where}.{name}", "already woven", expected, hint)


def point_at_mains(
    optimizer: torch.optim.Optimizer, gradients: Gradients, params: Iterable[nn.Parameter]
) -> None:
    """Let the optimizer update what this process updates, with each parameter's settings.

    That is the parameter itself, a master copy where the model has another precision, or the
    pieces of either in this process's segments, none or several (ZeRO). ``params``: all that the
    gradient path knows.
    """
    trained = {id(param) for param in params}
    mains: dict[int, list[Tensor]] = {}
    for main in gradients.mains:
        mains.setdefault(id(main.param), []).append(main.value)
    for group in optimizer.param_groups:
        found = [mains.get(id(p), [] if id(p) in trained else [p]) for p in group["params"]]
        if "param_names" in group:
            pairs = zip(group["param_names"], found, strict=True)
            group["param_names"] = [name for name, values in pairs for _ in values]
        group["params"] = [value for values in found for value in values]


@torch.no_grad()
def set_exact(gradients: Gradients, exact: Mapping[str, Tensor]) -> None:
    """Start what the optimizer updates from values that the model's precision has rounded.

    ``exact``: whole parameters by name; those left out stay as they are.
    """
    for main in gradients.mains:
        if main.spec.name in exact:
            main.value.copy_(exact[main.spec.name][main.box.slices()])


def num_samples(batch: Any) -> int:
    """Samples of a batch: a tensor, or a tuple, list or mapping of batches."""
    sizes = {len(tensor) for tensor in leaves(batch)}
    if len(sizes) != 1 or 0 in sizes:
        expected = "tensors with the same number of samples, at least one, along dimension 0"
        raise ConfigError("batch", sorted(sizes), expected)
    return sizes.pop()


def leaves(batch: Any) -> list[Tensor]:
    """The tensors of a batch, each with samples; in the order in which ``mapped`` meets them."""
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

"""``weft.weave_layers``: train a list of layers under any plan of pipelines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.api.alike import Calls
from weft.api.engine import (
    WovenEngine,
    assemble_own,
    close_at_exit,
    in_dtype,
    leaves,
    num_samples,
    weighted_sum,
)
from weft.api.layer_list import (
    PROBE,
    WAY_OUT,
    ElementLoss,
    Layer,
    Skeleton,
    in_words,
    on_meta,
    refuse_modules,
    refusing,
)
from weft.api.refusals import (
    refuse_delayed_scales,
    refuse_norm,
    refuse_optimizer,
    refuse_sites,
    refuse_state_elsewhere,
    refuse_unlike,
    refuse_whole_rules,
    refuse_woven,
    whole_number,
)
from weft.api.units import refuse_no_units
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.config.axes import INNER_AXES, NAMES
from weft.config.errors import ConfigError
from weft.nn.context import Context
from weft.nn.stage import STREAM, MicroBatch, Output, Term, Terms, Tree, Unit, rows_of
from weft.parallel.pipeline.executor import Executor
from weft.plan.layout import Border, BorderTensor, Dim
from weft.plan.model import UnitName
from weft.plan.plan import Plan
from weft.planner.validate import refuse_idle_zero, validate_plan
from weft.precision.registry import PRECISIONS
from weft.train.assemble import Share, Source, whole_tilings
from weft.train.joining import join_plan

MakeOptimizer = Callable[[list[tuple[str, Tensor]]], torch.optim.Optimizer]
"""(name, parameter) pairs of this process -> what updates them."""


def weave_layers(
    layers: Sequence[Layer],
    optimizer: MakeOptimizer,
    *,
    loss: ElementLoss,
    plan: Plan,
    seed: int = 0,
    emulate_fp8: bool = False,
    max_grad_norm: float | None = None,
) -> WovenEngine:
    """Make a list of layers train over every process of the job. Each builds its own alone.

    A batch is (inputs, targets) or (inputs, targets, weights), a tensor each; without weights
    every loss counts the same.

    Args:
        layers: The model; what one layer gives is what the next one takes.
        optimizer: Makes the optimizer from (name, parameter) pairs, which PyTorch's take as they
            are: ``functools.partial(torch.optim.AdamW, lr=1e-3)``.
        loss: Losses of the last layer's output, not reduced.
        plan: Which layers are where, e.g. from ``weft.split``.
        seed: Of the initial values. Each layer starts from (seed, its number) alone.
        emulate_fp8: As for ``weave``.
        max_grad_norm: Clip gradients to this norm.

    Raises:
        ConfigError: something about the layers or the plan cannot work.
    """
    address = RankAddress.from_environment() or RankAddress()
    check_layer_plan(plan, layers)
    refuse_norm(max_grad_norm)
    whole_number("seed", seed, least=0)
    if not callable(optimizer):
        expected = "what makes one of (name, parameter) pairs"
        hint = "Such as functools.partial(torch.optim.AdamW, lr=1e-3): each process makes its own."
        raise ConfigError("optimizer", type(optimizer).__name__, expected, hint)
    if plan.world_size != address.world_size:
        raise ConfigError("plan", f"{plan.world_size} ranks", f"{address.world_size} ranks")
    comm, _ = join_plan(address, plan)
    close_at_exit(comm)
    return build_layers(
        layers,
        optimizer,
        comm,
        loss=loss,
        plan=plan,
        seed=seed,
        emulate_fp8=emulate_fp8,
        max_grad_norm=max_grad_norm,
    )


def check_layer_plan(plan: Plan, layers: Sequence[Layer]) -> None:
    """Refuse what only a model that Weft knows can do."""
    if not isinstance(plan, Plan):
        raise ConfigError("plan", plan, "a weft.plan.plan.Plan, e.g. from weft.split")
    refuse_modules(layers)
    validate_plan(plan, num_layers=len(layers), global_batch=plan.global_batch)
    refuse_sites(plan)
    refuse_state_elsewhere(plan)
    refuse_delayed_scales(plan)
    for p, s, stage in plan.stages():
        where = f"plan.pipelines[{p}].stages[{s}]"
        if stage.mesh.inner_axes:
            expected = f"axes none of which is {' or '.join(INNER_AXES)}"
            use = " or ".join(name for name in NAMES if name not in INNER_AXES)
            hint = (
                f"Weft has no layout that says how these layers are cut: use {use} or more stages."
            )
            raise ConfigError(f"{where}.mesh", dict(stage.mesh.axes), expected, hint)
        if stage.zero == 3:
            hint = "Level 3 needs to know when each block computes; 2 shares all but parameters."
            raise ConfigError(f"{where}.zero", 3, "2 at most for a list of layers", hint)
        if stage.compile:
            hint = "Let the layers' own constructors compile what they compute."
            raise ConfigError(f"{where}.compile", True, "false for a list of layers", hint)
        if s == 0 and stage.layers[1] == 0:
            raise ConfigError(f"{where}.layers", [0, 0], "at least one layer in a first stage")
    keys = [layer.key for layer in layers if layer.key is not None]
    if len(keys) == len(set(keys)):  # else stages anywhere may hold the same parameters
        refuse_idle_zero(plan, tied=False)


def build_layers(
    layers: Sequence[Layer],
    optimizer: MakeOptimizer,
    comm: Comm,
    *,
    loss: ElementLoss,
    plan: Plan,
    seed: int = 0,
    emulate_fp8: bool = False,
    max_grad_norm: float | None = None,
) -> WovenEngine:
    """This process's layers and engine, for what ``weave_layers`` has checked. Collective."""
    part = _Part(layers, loss, plan, comm, seed)
    specs = part.skeleton.param_specs()
    names = {spec.name for spec in specs}
    settings = {"seed": seed, "max_grad_norm": max_grad_norm, "plan": str(plan)}
    settings["emulate_fp8"] = emulate_fp8
    refuse_unlike(comm, {**{spec.name: str([*spec.shape]) for spec in specs}, **settings})
    refuse_no_units(plan, comm, asked=emulate_fp8)
    refuse_whole_rules(optimizer, {s.name: len(s.shape) for s in specs}, plan, comm.device)
    trained = {
        name: param
        for home, module in part.modules.items()
        for name, param in module.named_parameters(prefix=f"layers.{home}")
        if name in names
    }
    source = Source(
        specs=specs,
        tilings=whole_tilings(specs, plan),
        precision=part.roles,
        stage=part.stage,
        objective=lambda _last: partial(_weighted, loss),
        expected_weight=float(plan.global_batch),
        may_be_absent=True,
    )
    updates = optimizer([*trained.items()] or [("nothing", torch.zeros(0))])
    refuse_optimizer(updates)
    built = assemble_own(plan, source, comm, updates, exact=part.exact, max_grad_norm=max_grad_norm)
    held = {n: module for stage in part.stages.values() for n, module in stage.layers.items()}
    return WovenEngine(built, comm, partial(part.cut, built.executor), held, part.calls)


class _Found(NamedTuple):
    """What follows from a batch's shape."""

    borders: Mapping[int, Border]
    in_place: set[int]
    losses: tuple[int, ...]
    """Shape of those of a sample."""


class _Part:
    """What one process has of a list of layers: it builds its own and takes its microbatches."""

    def __init__(
        self, layers: Sequence[Layer], loss: ElementLoss, plan: Plan, comm: Comm, seed: int
    ) -> None:
        self.skeleton = Skeleton(layers)
        self.roles = PRECISIONS[plan.rank_plan(comm.rank).stage_plan.precision]
        self.exact: dict[str, Tensor] = {}
        """Values before they were rounded to the plan's precision."""
        self.stages: dict[int, LayerStage] = {}
        self.calls = Calls()
        """Of each layer, with passes and recomputing."""
        self._loss = loss
        self._rank_plan = plan.rank_plan(comm.rank)
        self._device = comm.device
        self._found: dict[tuple[Any, ...], _Found] = {}
        homes = {self.skeleton.homes[n] for s in self._rank_plan.stages for n in self._numbers(s)}
        self.modules = {home: self._build(home, seed) for home in sorted(homes)}
        """By the first number that uses them."""

    def _numbers(self, stage: int) -> range:
        return self._rank_plan.pipeline_plan.stages[stage].blocks

    def _build(self, home: int, seed: int) -> nn.Module:
        dtype = self.roles.parameters.dtype
        with torch.random.fork_rng(devices=[]):  # a layer starts the same under every split
            digest = hashlib.blake2b(f"{seed}:layers.{home}".encode(), digest_size=8).digest()
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            module = self.skeleton.layers[home].build()
        refuse_woven(f"layers[{home}]", module)
        module.to(self._device)
        for name, param in module.named_parameters():
            if param.dtype != dtype:
                self.exact[f"layers.{home}.{name}"] = param.detach()
        in_dtype(module, dtype)
        return module

    def stage(self, number: int, _share: Share) -> LayerStage:
        homes = self.skeleton.homes
        layers = {n: self.skeleton.layers[n] for n in self._numbers(number)}
        modules = {n: self.modules[homes[n]] for n in layers}
        self.stages[number] = LayerStage(layers, modules, homes, self.calls)
        return self.stages[number]

    def cut(self, executor: Executor, batch: Any) -> list[MicroBatch]:
        """Check a global batch, the same on every process, and make ready for its shape."""
        _check_samples(batch, self._rank_plan.plan)
        found = self._look_up(*batch[:2])
        inputs, targets = (tensor.to(self._device) for tensor in batch[:2])
        if inputs.is_floating_point():
            inputs = inputs.to(self.roles.compute.dtype)
        tree = {STREAM: inputs, "targets": targets}
        if len(batch) == 3:
            tree["weights"] = batch[2].to(inputs.device)
            _check_weights(tuple(batch[2].shape), found.losses)
        executor.cross(found.borders)
        for stage in self.stages.values():
            stage.in_place = found.in_place
        parts = self._rank_plan.microbatches()
        return [MicroBatch(rows_of(tree, slice(part.start, part.stop))) for part in parts]

    def _look_up(self, *given: Tensor) -> _Found:
        """``given``: inputs and targets, of which the shape of a sample and the dtype matter."""
        key = tuple((x.shape[1:], x.dtype) for x in given)
        if key not in self._found:
            inputs, targets = map(_probe, given)
            outputs, in_place = self.skeleton.outputs(inputs)
            stages = self._rank_plan.pipeline_plan.stages[:-1]
            borders = {
                s: _border(outputs, int(stage.layers[1]) - 1) for s, stage in enumerate(stages)
            }
            losses = _losses_a_sample(self._loss, outputs[-1], targets)
            self._found[key] = _Found(borders, in_place, losses)
        return self._found[key]


class LayerStage:
    """Consecutive layers, each a unit that takes what the one before it gives."""

    spans_samples = False

    def __init__(
        self,
        layers: Mapping[int, Layer],
        modules: Mapping[int, nn.Module],
        homes: Sequence[int],
        calls: Calls,
    ) -> None:
        self.module = nn.Module()
        self.module.layers = nn.ModuleDict({str(homes[n]): m for n, m in modules.items()})
        self.in_place: set[int] = set()
        """Layers that write to what they take."""
        self.layers = modules
        """By number."""
        self._described = layers
        self._calls = calls
        self.units: dict[UnitName, Unit] = {
            n: Unit(
                partial(self._call, n),
                block=module,
                draws=True,
                may_defer=layers[n].key is None and _may_defer(module),
            )
            for n, module in modules.items()
        }

    def compute(self, inputs: Tree, _context: Context, /) -> Output:
        """The batch's inputs, or what crossed the border, to what crosses the next one."""
        x = inputs[STREAM]
        for unit in self.units.values():
            x = unit(x)
        return Output({STREAM: x})

    def _call(self, number: int, x: Tensor) -> Tensor:
        module = self.units[number].block
        assert module is not None, "every layer is a block"
        if number in self.in_place:  # spares the batch, and what recomputing starts from
            x = x.clone()
        with self._calls.of(number, module):
            return self._described[number].call(module, x)


def _weighted(loss: ElementLoss, output: Tree, batch: Tree) -> Terms:
    """``targets`` and, where the user gives them, ``weights`` of the losses in any shape."""
    losses = loss(output[STREAM], batch["targets"])
    if "weights" not in batch:
        return weighted_sum({"losses": losses}, batch)
    weights = batch["weights"]
    total = (losses * weights.view(losses.shape).to(losses.dtype)).sum()
    return {"loss": Term(total, weights.sum(dtype=torch.float64))}


def _check_samples(batch: Any, plan: Plan) -> None:
    expected = "(inputs, targets) or (inputs, targets, weights), tensors"
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise ConfigError("batch", type(batch).__name__, expected)
    if not all(isinstance(tensor, Tensor) for tensor in batch):
        raise ConfigError("batch", [type(tensor).__name__ for tensor in batch], expected)
    num_samples(leaves(batch), plan)


def _check_weights(given: tuple[int, ...], losses: tuple[int, ...]) -> None:
    """In the shape of the losses or in a row, where dimensions of size 1 do not matter."""
    row, wanted = [n for n in given[1:] if n != 1], [n for n in losses if n != 1]
    if row not in (wanted, [prod(wanted)]):
        expected = f"one for each of the {prod(losses)} losses of a sample, {list(losses)}"
        raise ConfigError("batch.weights", given, expected)


def _may_defer(module: nn.Module) -> bool:
    """Weight gradients of its linear layers can wait: nothing else computes with them."""
    every = [param for _, param in module.named_parameters(remove_duplicate=False)]
    return len(every) == len(set(every))


def _probe(x: Tensor) -> Tensor:
    dtype = torch.get_default_dtype() if x.is_floating_point() else x.dtype
    return torch.empty((PROBE, *x.shape[1:]), dtype=dtype, device="meta")


def _border(outputs: Sequence[Tensor], number: int) -> Border:
    """What layer ``number`` gives to the next stage."""
    crossing = outputs[number]
    if not crossing.is_floating_point() or not crossing.ndim or len(crossing) != PROBE:
        value = f"{list(crossing.shape)} of {crossing.dtype} for {PROBE} samples"
        expected = "floating point numbers, samples first, where a stage ends"
        raise ConfigError(f"layers[{number}]", value, expected)
    dims = tuple(Dim(name=f"dim {n}", size=size) for n, size in enumerate(crossing.shape[1:]))
    return {STREAM: BorderTensor(dims)}


def _losses_a_sample(loss: ElementLoss, output: Tensor, targets: Tensor) -> tuple[int, ...]:
    expected = f"a loss that takes {in_words(output)} and {in_words(targets)}"
    with refusing("loss", str(loss), expected, WAY_OUT):
        losses = on_meta(partial(loss, output, targets))
    if losses.ndim == 0 or losses.numel() % PROBE:
        hint = 'Pass reduction="none": Weft takes the mean over the whole job.'
        expected = "losses that are not reduced"
        raise ConfigError("loss", f"losses of shape {list(losses.shape)}", expected, hint)
    return losses.shape[1:] if len(losses) == PROBE else (losses.numel() // PROBE,)

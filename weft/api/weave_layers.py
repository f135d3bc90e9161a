"""``weft.weave_layers``: train a list of layers under any plan of pipelines."""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.api.engine import (
    Parts,
    WovenEngine,
    num_samples,
    point_at_mains,
    refuse_woven,
    set_exact,
)
from weft.api.layer_list import CANNOT, PROBE, ElementLoss, Layer, Skeleton, in_words
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.config.errors import ConfigError
from weft.nn.context import Context
from weft.optim.pytorch import TorchOptimizer
from weft.parallel.gradients import Gradients
from weft.parallel.params import LocalParam, held_pieces, parts_of, reduction_groups, stages_with
from weft.parallel.pipeline.deferred import DeferredLinear, WeightWork, defer_linears
from weft.parallel.pipeline.executor import Executor, MicroBatch
from weft.parallel.pipeline.passes import InPasses
from weft.parallel.pipeline.seam import channels
from weft.plan.box import Box
from weft.plan.model import ParamSpec
from weft.plan.plan import Plan, Seat
from weft.plan.tiling import Stored, Tiling
from weft.planner.sharing import refuse_idle_zero
from weft.planner.validate import validate_plan
from weft.precision.roles import PRECISIONS
from weft.schedules.registry import splits_backward
from weft.train.engine import Engine
from weft.train.joining import join_plan

MakeOptimizer = Callable[[list[tuple[str, Tensor]]], torch.optim.Optimizer]
"""(name, parameter) pairs of this process -> what updates them."""
Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerJob:
    """What ``weave_layers`` was asked for."""

    layers: Sequence[Layer]
    optimizer: MakeOptimizer
    loss: ElementLoss
    plan: Plan
    seed: int = 0
    max_grad_norm: float | None = None


def weave_layers(
    layers: Sequence[Layer],
    optimizer: MakeOptimizer,
    *,
    loss: ElementLoss,
    plan: Plan,
    seed: int = 0,
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
        max_grad_norm: Clip gradients to this norm.

    Raises:
        ConfigError: something about the layers or the plan cannot work.
    """
    address = RankAddress.from_environment() or RankAddress()
    check_layer_plan(plan, layers)
    if plan.world_size != address.world_size:
        raise ConfigError("plan", f"{plan.world_size} ranks", f"{address.world_size} ranks")
    comm, _ = join_plan(address, plan)
    atexit.register(comm.close)
    return build_layers(LayerJob(layers, optimizer, loss, plan, seed, max_grad_norm), comm)


def check_layer_plan(plan: Plan, layers: Sequence[Layer]) -> None:
    """Refuse what only a model that Weft knows can do."""
    if not isinstance(plan, Plan):
        raise ConfigError("plan", plan, "a weft.plan.plan.Plan, e.g. from weft.split")
    validate_plan(plan, num_layers=len(layers), global_batch=plan.global_batch)
    for p, s, stage in plan.stages():
        where = f"plan.pipelines[{p}].stages[{s}]"
        if stage.mesh.size("tp") > 1:
            hint = "Weft has no layout that says how these layers are cut: use dp or more stages."
            raise ConfigError(f"{where}.mesh", dict(stage.mesh.axes), "no tp axis", hint)
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


def build_layers(job: LayerJob, comm: Comm) -> WovenEngine:
    """This process's layers and engine. Collective."""
    skeleton = Skeleton(job.layers)
    seat = job.plan.seat(comm.rank)
    modules, exact = _modules(job, skeleton, seat, comm.device)
    gradients = _gradients(job.plan, skeleton, seat, modules, comm)
    set_exact(gradients, exact)
    trained = _trained(skeleton, modules)
    named: list[tuple[str, Tensor]] = [*trained.items()]
    optimizer = job.optimizer(named or [("nothing", torch.zeros(0))])
    point_at_mains(optimizer, gradients, trained.values())
    passes = _Passes(job, skeleton, seat, modules, comm, gradients)
    updates = TorchOptimizer(optimizer, gradients)
    engine: Engine[Any] = Engine(
        passes.train,
        gradients,
        updates,
        comm,
        expected_weight=float(job.plan.global_batch),
        max_grad_norm=job.max_grad_norm,
    )
    held = {n: modules[skeleton.homes[n]] for s in seat.stages for n in _numbers(seat, s)}
    return WovenEngine(engine, updates, comm, Parts(passes.cut, passes.evaluate, held))


def _numbers(seat: Seat, stage: int) -> range:
    return range(*seat.pipeline_plan.stages[stage].layers)


def _modules(
    job: LayerJob, skeleton: Skeleton, seat: Seat, device: torch.device
) -> tuple[dict[int, nn.Module], dict[str, Tensor]]:
    """This process's modules by the first number that uses them, and their exact values."""
    modules, exact = {}, {}
    dtype = PRECISIONS[seat.stage_plan.precision].parameters.dtype
    for home in sorted({skeleton.homes[n] for s in seat.stages for n in _numbers(seat, s)}):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_layer_seed(job.seed, home))
            module = job.layers[home].build()
        refuse_woven(f"layers[{home}]", module)
        module.to(device)
        for name, param in module.named_parameters():
            if param.dtype != dtype:
                exact[f"layers.{home}.{name}"] = param.detach()
        modules[home] = module.to(dtype)
    return modules, exact


def _layer_seed(seed: int, number: int) -> int:
    """So that a layer starts the same under every split."""
    digest = hashlib.blake2b(f"{seed}:layers.{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _trained(skeleton: Skeleton, modules: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    """This process's parameters by logical name, in forward order."""
    specs = {spec.name for spec in skeleton.param_specs()}
    every = {
        f"layers.{home}.{name}": param
        for home, module in modules.items()
        for name, param in module.named_parameters()
    }
    return {name: param for name, param in every.items() if name in specs}


def _gradients(
    plan: Plan, skeleton: Skeleton, seat: Seat, modules: Mapping[int, nn.Module], comm: Comm
) -> Gradients:
    specs = skeleton.param_specs()
    tilings = {spec.name: _tiling(spec, plan) for spec in specs}
    pieces = held_pieces(plan, specs, tilings)
    comm.open_groups(reduction_groups(pieces))
    comm.open_gathering(reduction_groups(pieces, sharded=True))
    comm.open_channels(channels(plan))
    trained = _trained(skeleton, modules)
    mine = [spec for spec in specs if spec.name in trained]
    parts = [set(_numbers(seat, stage)) for stage in seat.stages]
    local = [
        LocalParam(
            spec,
            Stored.whole(spec.shape),
            trained[spec.name],
            uses=sum(bool(part & parts_of(spec)) for part in parts),
        )
        for spec in mine
    ]
    return Gradients(
        local,
        pieces,
        comm,
        precision=PRECISIONS[seat.stage_plan.precision],
        rounds=seat.pipeline_plan.num_microbatches,
        may_be_absent=True,
    )


def _tiling(spec: ParamSpec, plan: Plan) -> Tiling:
    """Every rank of a stage that computes with a parameter holds all of it."""
    whole = (Box.whole(spec.shape),)
    ranks = [rank for stage in stages_with(spec, plan) for rank in stage.mesh.ranks]
    return Tiling(spec.shape, dict.fromkeys(ranks, whole))


@dataclass(frozen=True, slots=True)
class _Shape:
    """What an executor must know of a batch: sample shapes and dtypes."""

    inputs: tuple[int, ...]
    inputs_dtype: torch.dtype
    targets: tuple[int, ...]
    targets_dtype: torch.dtype
    is_weighted: bool


@dataclass(frozen=True, slots=True)
class _Part:
    """This process's part of a global batch."""

    shape: _Shape
    microbatches: Sequence[MicroBatch | None]


class _Stage:
    """Consecutive layers, as the executor computes them."""

    def __init__(
        self, calls: Sequence[Call], loss: ElementLoss, *, recompute: bool, is_weighted: bool
    ) -> None:
        self._calls = calls
        self._loss = loss
        self._recompute = recompute
        self._is_weighted = is_weighted

    def __call__(self, x: Tensor, _context: Context, /) -> Tensor:
        for call in self._calls:
            x = checkpoint(call, x, use_reentrant=False) if self._recompute else call(x)
        return x

    def loss(self, hidden: Tensor, targets: Tensor, weights: Tensor, /) -> Tensor:
        losses = self._loss(hidden, targets)
        if self._is_weighted:
            losses = losses * weights.view(losses.shape).to(losses.dtype)
        return losses.sum()


class _Passes:
    """Forward and backward of a process's stages, for batches of any shape."""

    def __init__(
        self,
        job: LayerJob,
        skeleton: Skeleton,
        seat: Seat,
        modules: Mapping[int, nn.Module],
        comm: Comm,
        gradients: Gradients,
    ) -> None:
        self._job = job
        self._skeleton = skeleton
        self._seat = seat
        self._comm = comm
        self._gradients = gradients
        self._work = WeightWork() if splits_backward(seat.pipeline_plan.schedule) else None
        self._calls = {s: self._calls_of(s, modules) for s in seat.stages}
        self._executors: dict[_Shape, tuple[Executor, int]] = {}

    def _calls_of(self, stage: int, modules: Mapping[int, nn.Module]) -> list[Call]:
        calls: list[Call] = []
        for number in _numbers(self._seat, stage):
            layer, module = self._job.layers[number], modules[self._skeleton.homes[number]]
            if self._work is not None and layer.key is None and _may_defer(module):
                if type(module) is nn.Linear:
                    module = DeferredLinear(module, self._work)
                else:
                    defer_linears(module, self._work)
            calls.append(partial(layer.call, module))
        return calls

    def train(self, part: _Part) -> Tensor:
        return self._executor(part.shape)[0].train(part.microbatches)

    def evaluate(self, part: _Part) -> Tensor:
        return self._executor(part.shape)[0].evaluate(part.microbatches)

    def cut(self, batch: Any) -> _Part:
        """Check a global batch, the same on every process, and take this one's microbatches."""
        count = _checked_samples(batch, self._job.plan.global_batch)
        inputs, targets = (tensor.to(self._comm.device) for tensor in batch[:2])
        if inputs.is_floating_point():
            inputs = inputs.to(PRECISIONS[self._seat.stage_plan.precision].compute.dtype)
        shape = _Shape(
            tuple(inputs.shape[1:]),
            batch[0].dtype,
            tuple(targets.shape[1:]),
            targets.dtype,
            len(batch) == 3,
        )
        _, per_sample = self._executor(shape)
        weights = torch.full((count,), float(per_sample), device=inputs.device)
        if len(batch) == 3:
            weights = batch[2].to(inputs.device)
            if weights.numel() != count * per_sample:
                expected = f"one for each of the {per_sample} losses of a sample"
                raise ConfigError("batch.weights", tuple(weights.shape), expected)
        tensors = (inputs, targets, weights)
        parts = self._seat.microbatches()
        return _Part(shape, [_microbatch(part, *tensors) if part else None for part in parts])

    def _executor(self, shape: _Shape) -> tuple[Executor, int]:
        """What computes batches of a shape, and how many losses a sample has."""
        if shape not in self._executors:
            probe = _probe(shape.inputs, shape.inputs_dtype)
            outputs, in_place = self._skeleton.outputs(probe)
            stages = self._seat.pipeline_plan.stages
            border = {s: _border(outputs, stages[s].layers[1] - 1) for s in range(len(stages) - 1)}
            targets = _probe(shape.targets, shape.targets_dtype)
            per_sample = _losses_a_sample(self._job.loss, outputs[-1], targets)
            executor = self._make_executor(border, in_place, is_weighted=shape.is_weighted)
            self._executors[shape] = executor, per_sample
        return self._executors[shape]

    def _make_executor(
        self, border: Mapping[int, tuple[int, ...]], in_place: set[int], *, is_weighted: bool
    ) -> Executor:
        stages = {}
        for number, every in self._calls.items():
            numbers = _numbers(self._seat, number)
            calls = [
                partial(_on_a_copy, call) if n in in_place else call
                for n, call in zip(numbers, every, strict=True)
            ]
            asked = self._seat.pipeline_plan.stages[number]
            recompute = asked.recompute == "full"
            stage = _Stage(calls, self._job.loss, recompute=recompute, is_weighted=is_weighted)
            stages[number] = stage if asked.passes == 1 else InPasses(stage, asked.passes)
        return Executor(
            self._seat,
            stages,
            self._comm,
            self._gradients,
            border=border,
            scale=float(self._job.plan.global_batch),
            work=self._work,
        )


def _on_a_copy(call: Call, x: Tensor) -> Tensor:
    """Spares the batch, what came from another stage, and what recomputing starts from."""
    return call(x.clone())


_NONE = Context()
"""Layers of a list know nothing of their samples but what they are given."""


def _checked_samples(batch: Any, wanted: int) -> int:
    expected = "(inputs, targets) or (inputs, targets, weights), tensors"
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise ConfigError("batch", type(batch).__name__, expected)
    if not all(isinstance(tensor, Tensor) for tensor in batch):
        raise ConfigError("batch", [type(tensor).__name__ for tensor in batch], expected)
    count = num_samples(batch)
    if count != wanted:
        raise ConfigError("batch", f"{count} samples", f"{wanted} samples, as in the plan")
    return count


def _microbatch(part: range, inputs: Tensor, targets: Tensor, weights: Tensor) -> MicroBatch:
    taken = slice(part.start, part.stop)
    return MicroBatch(inputs[taken], targets[taken], weights[taken], _NONE)


def _may_defer(module: nn.Module) -> bool:
    """Weight gradients of its linear layers can wait: nothing else computes with them."""
    every = [param for _, param in module.named_parameters(remove_duplicate=False)]
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    return len(every) == len(set(every)) and not hooked


def _probe(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    dtype = torch.get_default_dtype() if dtype.is_floating_point else dtype
    return torch.empty((PROBE, *shape), dtype=dtype, device="meta")


def _border(outputs: Sequence[Tensor], number: int) -> tuple[int, ...]:
    """Shape of what layer ``number`` gives to the next stage, of one sample."""
    crossing = outputs[number]
    if not crossing.is_floating_point() or not crossing.ndim or len(crossing) != PROBE:
        value = f"{list(crossing.shape)} of {crossing.dtype} for {PROBE} samples"
        expected = "floating point numbers, samples first, where a stage ends"
        raise ConfigError(f"layers[{number}]", value, expected)
    return tuple(crossing.shape[1:])


def _losses_a_sample(loss: ElementLoss, output: Tensor, targets: Tensor) -> int:
    try:
        with torch.no_grad():
            losses = loss(output, targets)
    except CANNOT as error:
        expected = f"a loss that takes {in_words(output)} and {in_words(targets)}"
        hint = f"{type(error).__name__}: {error}"
        raise ConfigError("loss", str(loss), expected, hint) from error
    if losses.ndim == 0 or losses.numel() % PROBE:
        hint = 'Pass reduction="none": Weft takes the mean over the whole job.'
        expected = "losses that are not reduced"
        raise ConfigError("loss", f"losses of shape {list(losses.shape)}", expected, hint)
    return losses.numel() // PROBE

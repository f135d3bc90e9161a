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

from weft.api.engine import (
    Parts,
    WovenEngine,
    num_samples,
    point_at_mains,
    refuse_woven,
    set_exact,
)
from weft.api.layer_list import CANNOT, PROBE, ElementLoss, Layer, Skeleton, in_words
from weft.api.objective import weighted_sum
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.config.axes import MODEL_AXES
from weft.config.errors import ConfigError
from weft.nn.context import Context
from weft.nn.stage import (
    STREAM,
    MicroBatch,
    Objective,
    Output,
    Stage,
    Term,
    Terms,
    Tree,
    Unit,
    rows_of,
)
from weft.optim.pytorch import TorchOptimizer
from weft.parallel.gradients import Gradients
from weft.parallel.params import stages_with
from weft.parallel.pipeline.executor import Executor
from weft.plan.box import Box
from weft.plan.layout import Border, BorderTensor, Dim
from weft.plan.model import ParamSpec, UnitName
from weft.plan.plan import PipelinePlan, Plan, Seat
from weft.plan.tiling import Tiling
from weft.planner.validate import refuse_idle_zero, validate_plan
from weft.precision.registry import PRECISIONS
from weft.precision.roles import Roles
from weft.train.assemble import Options, Share, assemble
from weft.train.joining import join_plan

MakeOptimizer = Callable[[list[tuple[str, Tensor]]], torch.optim.Optimizer]
"""(name, parameter) pairs of this process -> what updates them."""


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
        if stage.mesh.model_axes:
            expected = f"no {' or '.join(MODEL_AXES)} axis"
            hint = "Weft has no layout that says how these layers are cut: use dp or more stages."
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


def build_layers(job: LayerJob, comm: Comm) -> WovenEngine:
    """This process's layers and engine. Collective."""
    source = _ListSource(job, comm)

    def pointed(gradients: Gradients) -> TorchOptimizer:
        set_exact(gradients, source.exact)
        trained = source.trained()
        optimizer = job.optimizer([*trained.items()] or [("nothing", torch.zeros(0))])
        point_at_mains(optimizer, gradients, trained.values())
        return TorchOptimizer(optimizer, gradients)

    options = Options(max_grad_norm=job.max_grad_norm)
    built = assemble(job.plan, source, comm, pointed, options)
    cut = _Cut(source, built.executor)
    parts = Parts(cut, built.executor.evaluate, source.held())
    return WovenEngine(built.engine, built.optimizer, comm, parts)


class _ListSource:
    """A list of layers as something to assemble: each process builds its own."""

    may_be_absent = True
    buffers = ()

    def __init__(self, job: LayerJob, comm: Comm) -> None:
        self.job = job
        self.skeleton = Skeleton(job.layers)
        self.seat = job.plan.seat(comm.rank)
        self.device = comm.device
        self.exact: dict[str, Tensor] = {}
        """Values before they were rounded to the plan's precision."""
        self.stages: dict[int, LayerStage] = {}
        numbers = [n for s in self.seat.stages for n in self._numbers(s)]
        homes = sorted({self.skeleton.homes[n] for n in numbers})
        self._modules = {home: self._build(home) for home in homes}
        """By the first number that uses them."""

    @property
    def specs(self) -> list[ParamSpec]:
        return self.skeleton.param_specs()

    def trained(self) -> dict[str, nn.Parameter]:
        """This process's parameters by logical name, in forward order."""
        specs = {spec.name for spec in self.specs}
        every = {
            f"layers.{home}.{name}": param
            for home, module in self._modules.items()
            for name, param in module.named_parameters()
        }
        return {name: param for name, param in every.items() if name in specs}

    def held(self) -> dict[int, nn.Module]:
        """This process's layers by number."""
        numbers = [n for s in self.seat.stages for n in self._numbers(s)]
        return {n: self._modules[self.skeleton.homes[n]] for n in numbers}

    def tilings(self, plan: Plan) -> dict[str, Tiling]:
        """Every rank of a stage that computes with a parameter holds all of it."""
        tilings = {}
        for spec in self.specs:
            ranks = [rank for stage in stages_with(spec, plan) for rank in stage.mesh.ranks]
            whole = (Box.whole(spec.shape),)
            tilings[spec.name] = Tiling(spec.shape, dict.fromkeys(ranks, whole))
        return tilings

    def precision(self, seat: Seat) -> Roles:
        return PRECISIONS[seat.stage_plan.precision]

    def stage(self, number: int, _share: Share) -> LayerStage:
        layers = {n: self.job.layers[n] for n in self._numbers(number)}
        modules = {n: self._modules[self.skeleton.homes[n]] for n in layers}
        self.stages[number] = LayerStage(layers, modules, self.skeleton.homes)
        return self.stages[number]

    def split(self, stage: Stage, share: Share) -> None:
        """No layout says how these layers are cut."""

    def objective(self, _last: Stage) -> Objective:
        return partial(_weighted, self.job.loss)

    def borders(self, _pipeline: PipelinePlan) -> dict[int, Border]:
        """None until the shape of a batch is known."""
        return {}

    def expected_weight(self, plan: Plan) -> float:
        return float(plan.global_batch)

    def _numbers(self, stage: int) -> range:
        return range(*self.seat.pipeline_plan.stages[stage].layers)

    def _build(self, home: int) -> nn.Module:
        dtype = self.precision(self.seat).parameters.dtype
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_layer_seed(self.job.seed, home))
            module = self.job.layers[home].build()
        refuse_woven(f"layers[{home}]", module)
        module.to(self.device)
        for name, param in module.named_parameters():
            if param.dtype != dtype:
                self.exact[f"layers.{home}.{name}"] = param.detach()
        return module.to(dtype)


def _layer_seed(seed: int, number: int) -> int:
    """So that a layer starts the same under every split."""
    digest = hashlib.blake2b(f"{seed}:layers.{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class LayerStage:
    """Consecutive layers, each a unit that takes what the one before it gives."""

    spans_samples = False

    def __init__(
        self, layers: Mapping[int, Layer], modules: Mapping[int, nn.Module], homes: Sequence[int]
    ) -> None:
        self.module = nn.Module()
        self.module.layers = nn.ModuleDict({str(homes[n]): m for n, m in modules.items()})
        self.in_place: set[int] = set()
        """Layers that write to what they take."""
        self._layers = layers
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
        return self._layers[number].call(module, x)


def _weighted(loss: ElementLoss, output: Tree, batch: Tree) -> Terms:
    """``targets`` and, where the user gives them, ``weights`` of the losses in any shape."""
    losses = loss(output[STREAM], batch["targets"])
    if "weights" not in batch:
        return weighted_sum({"losses": losses}, batch)
    weights = batch["weights"]
    total = (losses * weights.view(losses.shape).to(losses.dtype)).sum()
    return {"loss": Term(total, weights.sum(dtype=torch.float64))}


@dataclass(frozen=True, slots=True)
class _Shape:
    """What must be known of a batch: sample shapes and dtypes."""

    inputs: tuple[int, ...]
    inputs_dtype: torch.dtype
    targets: tuple[int, ...]
    targets_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Found:
    """What follows from a batch's shape."""

    borders: Mapping[int, Border]
    in_place: set[int]
    losses_a_sample: int


class _Cut:
    """Takes this process's microbatches from global batches of any shape."""

    def __init__(self, source: _ListSource, executor: Executor) -> None:
        self._source = source
        self._executor = executor
        self._found: dict[_Shape, _Found] = {}

    def __call__(self, batch: Any) -> list[MicroBatch]:
        """Check a global batch, the same on every process, and make ready for its shape."""
        source = self._source
        count = _checked_samples(batch, source.job.plan.global_batch)
        inputs, targets = (tensor.to(source.device) for tensor in batch[:2])
        if inputs.is_floating_point():
            inputs = inputs.to(source.precision(source.seat).compute.dtype)
        shapes = tuple(inputs.shape[1:]), batch[0].dtype, tuple(targets.shape[1:]), targets.dtype
        found = self._look_up(_Shape(*shapes))
        tree = {STREAM: inputs, "targets": targets}
        if len(batch) == 3:
            tree["weights"] = batch[2].to(inputs.device)
            if tree["weights"].numel() != count * found.losses_a_sample:
                expected = f"one for each of the {found.losses_a_sample} losses of a sample"
                raise ConfigError("batch.weights", tuple(batch[2].shape), expected)
        self._executor.cross(found.borders)
        for stage in source.stages.values():
            stage.in_place = found.in_place
        parts = source.seat.microbatches()
        return [MicroBatch(rows_of(tree, slice(part.start, part.stop))) for part in parts]

    def _look_up(self, shape: _Shape) -> _Found:
        if shape not in self._found:
            skeleton, loss = self._source.skeleton, self._source.job.loss
            outputs, in_place = skeleton.outputs(_probe(shape.inputs, shape.inputs_dtype))
            stages = self._source.seat.pipeline_plan.stages
            borders = {s: _border(outputs, stages[s].layers[1] - 1) for s in range(len(stages) - 1)}
            targets = _probe(shape.targets, shape.targets_dtype)
            per_sample = _losses_a_sample(loss, outputs[-1], targets)
            self._found[shape] = _Found(borders, in_place, per_sample)
        return self._found[shape]


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


def _may_defer(module: nn.Module) -> bool:
    """Weight gradients of its linear layers can wait: nothing else computes with them."""
    every = [param for _, param in module.named_parameters(remove_duplicate=False)]
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    return len(every) == len(set(every)) and not hooked


def _probe(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    dtype = torch.get_default_dtype() if dtype.is_floating_point else dtype
    return torch.empty((PROBE, *shape), dtype=dtype, device="meta")


def _border(outputs: Sequence[Tensor], number: int) -> Border:
    """What layer ``number`` gives to the next stage."""
    crossing = outputs[number]
    if not crossing.is_floating_point() or not crossing.ndim or len(crossing) != PROBE:
        value = f"{list(crossing.shape)} of {crossing.dtype} for {PROBE} samples"
        expected = "floating point numbers, samples first, where a stage ends"
        raise ConfigError(f"layers[{number}]", value, expected)
    dims = tuple(Dim(name=f"dim {n}", size=size) for n, size in enumerate(crossing.shape[1:]))
    return {STREAM: BorderTensor(dims)}


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

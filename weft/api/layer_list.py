"""A model as a list of layers that are described, not built: each process builds its own alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.api.refusals import (
    refuse_batch_statistics,
    refuse_lazy,
    refuse_odd_gradients,
    whole_number,
)
from weft.comm.address import RankAddress
from weft.config.errors import ConfigError
from weft.plan.mesh import Mesh
from weft.plan.model import Init, ParamSpec
from weft.plan.plan import DEFAULT_SCHEDULE, PipelinePlan, Plan, ScheduleName, StagePlan
from weft.plan.tiling import split_evenly
from weft.schedules.registry import SCHEDULES

Forward = Callable[[Any, Tensor], Tensor]
"""(the built layer, what the layer before gave) -> what the next one gets."""
ElementLoss = Callable[[Tensor, Tensor], Tensor]
"""(output of the last layer, targets) -> losses, not reduced."""

CANNOT = (RuntimeError, TypeError, ValueError, LookupError, AssertionError, AttributeError)
"""What modules raise for tensors they do not take, or that have no values."""
SETTINGS = tuple(each.name for each in fields(StagePlan) if each.name not in ("mesh", "layers"))
"""What ``split`` takes for every stage."""
PROBE = 2
"""Samples of the batch that finds shapes."""
WAY_OUT = (
    f"Shapes are found with {PROBE} samples on the meta device, which has no values: make other "
    "tensors on the device of what it takes (x.device), and let no value decide what is computed."
)


class Layer:
    """One layer: ``cls(*args, **kwargs)``, built by the processes that compute it."""

    def __init__(self, cls: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        self._cls = cls
        self._args = args
        self._kwargs = kwargs
        self.name = cls.__name__ if isinstance(cls, type) else str(cls)
        self.key: str | None = None
        """Layers of the same key are one module."""
        self.forward: Forward | None = None
        """How this place of the list computes with its module; None: it calls it."""

    def build(self) -> nn.Module:
        """A new module, in the default dtype on the default device."""
        return self._cls(*self._args, **self._kwargs)

    def call(self, module: nn.Module, x: Tensor) -> Tensor:
        """Forward at this place of the list. ``x`` and result: ``[batch, ...]``."""
        result: Tensor = module(x) if self.forward is None else self.forward(module, x)
        return result


def shared(
    key: str,
    cls: Callable[..., nn.Module],
    *args: Any,
    forward: Forward | None = None,
    **kwargs: Any,
) -> Layer:
    """A layer whose parameters are those of every other place of the list with the same ``key``.

    Their gradient is the sum over all places, wherever these are. ``forward(module, x)`` is how
    this place computes, if not by calling the module.
    """
    layer = Layer(cls, *args, **kwargs)
    layer.key, layer.forward = key, forward
    return layer


class Skeleton:
    """Every layer on the meta device: names and shapes of a whole model, without memory.

    Raises:
        ConfigError: a layer cannot be built there, or layers of one key are unlike.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        firsts: dict[str | int, int] = {}
        self.homes = [
            firsts.setdefault(i if layer.key is None else layer.key, i)
            for i, layer in enumerate(layers)
        ]
        """For each place of the list the first one with the same module."""
        built = [self._build(number) for number in range(len(layers))]
        for number, home in enumerate(self.homes):
            one, other = _shapes(built[home]), _shapes(built[number])
            if one != other:
                expected = f"the parameters of layers[{home}], of the same key: {one}"
                raise ConfigError(f"layers[{number}]", other, expected)
        self.modules = [built[home] for home in self.homes]
        """By number; shared ones are the same object."""

    def _build(self, number: int) -> nn.Module:
        module = _shapes_of(number, self.layers[number])
        refuse_batch_statistics(f"layers[{number}]", module)
        refuse_odd_gradients(f"layers[{number}]", module)
        return module

    def param_specs(self) -> list[ParamSpec]:
        """Every parameter that is trained, named by its number in the list, in forward order."""
        return [
            ParamSpec(
                name=f"layers.{home}.{name}",
                shape=tuple(param.shape),
                unit=home,
                init=Init("zeros"),
                decay=False,
                also=tuple(n for n, h in enumerate(self.homes) if h == home and n != home),
            )
            for home in sorted(set(self.homes))
            for name, param in self.modules[home].named_parameters()
            if param.requires_grad
        ]

    def outputs(self, inputs: Tensor) -> tuple[list[Tensor], set[int]]:
        """What each layer gives for ``inputs`` ``[PROBE, ...]``, all on the meta device.

        And which layers write to what they take, such as ``nn.ReLU(inplace=True)``.

        Raises:
            ConfigError: a layer does not take what the one before it gives.
        """
        found: list[Tensor] = []
        in_place: set[int] = set()
        for number, (layer, module) in enumerate(zip(self.layers, self.modules, strict=True)):
            x = found[-1] if found else inputs
            version = x._version
            expected = f"a layer that takes {in_words(x)}"
            with refusing(f"layers[{number}]", layer.name, expected, WAY_OUT):
                result = on_meta(partial(layer.call, module, x))
            if not isinstance(result, Tensor):
                expected = "a layer that gives one tensor"
                raise ConfigError(f"layers[{number}]", type(result).__name__, expected)
            if x._version != version:
                in_place.add(number)
            found.append(result)
        return found, in_place


def refuse_modules(layers: Sequence[Layer]) -> None:
    """What is built already would have to be on every process."""
    for number, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            hint = "Write weft.Layer(nn.Linear, 3, 2): each process builds what it computes."
            raise ConfigError(f"layers[{number}]", type(layer).__name__, "a weft.Layer", hint)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in module.named_parameters()}


def _shapes_of(number: int, layer: Layer) -> nn.Module:
    """A layer on the meta device.

    Raises:
        ConfigError: it cannot be built there, or does not say its shapes.
    """
    expected = "a layer that can be built on the meta device"
    with refusing(f"layers[{number}]", layer.name, expected), torch.device("meta"):
        module = layer.build()
    hint = "Build what says its sizes: each process asks for shapes before it computes."
    refuse_lazy(f"layers[{number}]", module, hint)
    return module


@contextmanager
def refusing(key: str, value: str, expected: str, way_out: str = "") -> Iterator[None]:
    """Say which module or loss of the user's it was that raised one of ``CANNOT``, and the way out
    where it is not one of shapes."""
    try:
        yield
    except CANNOT as error:
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        if way_out and ("meta" in str(error).lower() or isinstance(error, AssertionError)):
            said += f"{'' if said.endswith(('.', '!')) else '.'} {way_out}"
        raise ConfigError(key, value, expected, said) from error


@torch.no_grad()
def on_meta(call: Callable[[], Tensor]) -> Tensor:
    """What a call gives for tensors of the meta device; if need be, with what it makes itself there
    too, as it would be beside its input on a device that is the default one."""
    try:
        return call()
    except CANNOT as error:
        try:
            with torch.device("meta"):
                return call()
        except CANNOT:
            raise error from None


def in_words(x: Tensor) -> str:
    """Shape and dtype of a probe."""
    return f"[samples, {', '.join(map(str, x.shape[1:]))}] of {x.dtype}"


def split(
    layers: Sequence[Layer],
    by: Literal["uniform", "parameters"] | Sequence[int] = "uniform",
    *,
    samples: int,
    microbatch: int,
    meshes: int | None = None,
    dp: int = 1,
    schedule: ScheduleName = DEFAULT_SCHEDULE,
    **settings: Any,
) -> Plan:
    """A plan of one pipeline for a list of layers.

    Args:
        layers: The model.
        by: What the stages have about equally much of: layers ("uniform") or "parameters"; or
            how many layers each stage has.
        samples: In a global batch.
        microbatch: Samples in a microbatch, over all ``dp`` ranks of a mesh.
        meshes: In the pipeline, with ``dp`` ranks each; None: as many as this job has processes
            for. V-shaped and interleaved schedules put two stages on each.
        dp: Ranks that share the samples of a microbatch.
        schedule: In which order the work is done.
        settings: Further fields of every ``StagePlan``: precision, recompute, zero, passes. Layers
            that are built in float64 have the precision "fp64" where none is given.

    Raises:
        ConfigError: there are fewer layers than stages, counts that do not fit, or no such setting.
    """
    refuse_modules(layers)
    SCHEDULES.named("schedule", schedule)
    given = {} if meshes is None else {"meshes": meshes}
    _refuse_counts(samples=samples, microbatch=microbatch, dp=dp, **given)
    _refuse_settings(settings)
    if "precision" not in settings and _is_wide(layers):
        settings["precision"] = "fp64"
    if meshes is None:
        meshes = max(1, (RankAddress.from_environment() or RankAddress()).world_size // dp)
    grid = [Mesh.of(range(m * dp, m * dp + dp), dp=dp) for m in range(meshes)]
    positions = SCHEDULES[schedule].placement(meshes, meshes * SCHEDULES[schedule].chunks)
    mesh_of = {stage: mesh for mesh, stages in enumerate(positions) for stage in stages}
    grid = [grid[mesh_of[stage]] for stage in range(len(mesh_of))]
    counts = _counts(layers, by, len(grid))
    stages = tuple(
        StagePlan(mesh=mesh, layers=(sum(counts[:s]), sum(counts[: s + 1])), **settings)
        for s, mesh in enumerate(grid)
    )
    pipeline = PipelinePlan(
        stages=stages, samples=samples, microbatch=microbatch, schedule=schedule
    )
    return Plan(num_layers=len(layers), pipelines=(pipeline,))


def _refuse_counts(**counts: object) -> None:
    for name, number in counts.items():
        whole_number(name, number, least=1)


def _refuse_settings(settings: Mapping[str, object]) -> None:
    for name, value in settings.items():
        if name not in SETTINGS:
            expected = f"one of the settings of stages: {', '.join(SETTINGS)}"
            raise ConfigError(name, value, expected, "How many stages there are, meshes= says.")


def _is_wide(layers: Sequence[Layer]) -> bool:
    """All numbers of the first that has any are doubles: others are of its precision too."""
    built = (_shapes_of(number, layer) for number, layer in enumerate(layers))
    params = (param for module in built for param in module.parameters())
    return next((param.dtype == torch.float64 for param in params), False)


def _counts(
    layers: Sequence[Layer], by: Literal["uniform", "parameters"] | Sequence[int], stages: int
) -> list[int]:
    """Layers of each stage."""
    if not isinstance(by, str):
        whole = all(isinstance(each, int) for each in by)
        if not whole or len(by) != stages or sum(by) != len(layers):
            expected = f"{stages} counts that add up to {len(layers)}"
            raise ConfigError("by", list(by), expected)
        return list(by)
    if len(layers) < stages:
        raise ConfigError("layers", f"{len(layers)} layers", f"at least one for each of {stages}")
    if by == "uniform":
        return split_evenly(len(layers), stages)
    if by != "parameters":
        raise ConfigError("by", by, '"uniform", "parameters", or the layers of each stage')
    modules = Skeleton(layers).modules
    return balanced([sum(prod(p.shape) for p in m.parameters()) for m in modules], stages)


def balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Sizes of ``parts`` consecutive runs, none empty, whose largest sum is as small as can be."""
    best: Mapping[int, tuple[int, list[int]]] = {0: (0, [])}
    for part in range(1, parts + 1):
        rest = parts - part
        best = {
            end: min(
                (max(largest, sum(weights[start:end])), [*sizes, end - start])
                for start, (largest, sizes) in best.items()
                if start < end
            )
            for end in range(part, len(weights) - rest + 1)
        }
    return best[len(weights)][1]

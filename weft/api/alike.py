"""What processes hold of a model more than once: values, settings and buffers, the same on all.

Nothing sends them after the start, so where they differ, copies of a model go apart in silence.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from math import hypot
from typing import Any

import torch
from torch import Tensor, nn

from weft.api.refusals import digest_of, same_everywhere
from weft.comm.comm import Comm
from weft.config.errors import ConfigError, show

ALIKE = 1e-5
"""Of a tensor's norm: initial values that unlike machines compute differ by less."""
OF_THE_MACHINE = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""Of an optimizer's settings, those that change no number, or are not numbers."""


@torch.no_grad()
def refuse_unlike_values(params: Iterable[tuple[str, Tensor]], comm: Comm) -> None:
    """Collective; by their sums and norms.

    Raises:
        ConfigError: a parameter has other values on one process than on another.
    """
    if comm.world_size == 1:
        return
    numbers = {name: value for name, value in params if value.is_floating_point()}
    sums = [value.sum(dtype=torch.float64) for value in numbers.values()]
    norms = [torch.linalg.vector_norm(v, dtype=torch.float64) for v in numbers.values()]
    pairs = torch.stack([*sums, *norms]).view(2, -1).T.tolist() if numbers else []
    mine = dict(zip(numbers, pairs, strict=True))
    for name, ranks in _by_name(comm, mine, "compare values").items():
        (first, (total, norm)), *others = ranks.items()
        for rank, (other_total, other_norm) in others:
            if hypot(other_total - total, other_norm - norm) > ALIKE * max(norm, other_norm):
                hint = "Load values on every process, not on one alone."
                expected = f"the values that it has on rank {first}"
                raise ConfigError("model", f"{name} on rank {rank}", expected, hint)


def refuse_unlike_settings(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], comm: Comm
) -> None:
    """Collective. ``names``: of what the optimizer updates, by identity.

    Raises:
        ConfigError: it updates the same parameter otherwise on another process.
    """
    mine: dict[str, Any] = {}
    for group in optimizer.param_groups:
        settings = dict(_numbers(group))
        mine |= dict.fromkeys((names[id(p)] for p in group["params"] if id(p) in names), settings)
    for name, ranks in _by_name(comm, mine, "compare settings").items():
        (first, settings), *others = ranks.items()
        for rank, other in others:
            unlike = [k for k in {**settings, **other} if settings.get(k) != other.get(k)]
            for key in unlike[:1]:
                value = f"{show(other.get(key))} for {name} on rank {rank}"
                expected = f"{show(settings.get(key))}, as on rank {first}"
                hint = "Give every process the same settings, learning rates and schedules."
                raise ConfigError(f"optimizer: {key}", value, expected, hint)


class Calls:
    """How often each of some layers was computed, and which parameters its forward wrote.

    A forward that rescales what it looks up (``max_norm`` of an embedding) does so for the samples
    of its own process.
    """

    def __init__(self) -> None:
        self.times: Counter[int] = Counter()
        """Since ``begin``."""
        self.notes = True
        """What is written is noted."""
        self._written: dict[str, Tensor] = {}

    def begin(self) -> None:
        """A step."""
        self.times.clear()

    @contextmanager
    def of(self, number: int, module: nn.Module) -> Iterator[None]:
        """Around one of a layer."""
        self.times[number] += 1
        before = self.look(number, module)
        yield
        self.note(before)

    def look(self, number: int, module: nn.Module) -> dict[str, tuple[Tensor, int]]:
        """How often each parameter was written by now; nothing where none is noted."""
        if not self.notes or torch.compiler.is_compiling():  # which cannot compare them
            return {}
        return {name: (param, param._version) for name, param in named({number: module})}

    def note(self, before: Mapping[str, tuple[Tensor, int]]) -> None:
        """Those that were written since."""
        for name, (param, times) in before.items():
            if param._version > times:
                self._written[name] = param

    def refuse_writes(
        self, comm: Comm, *, alone: Callable[[Tensor], bool] = lambda _: False
    ) -> None:
        """Collective. ``alone``: one process that computes each layer once a step may write those
        that the optimizer updates themselves.

        Raises:
            ConfigError: forward wrote to a parameter.
        """
        once = comm.world_size == 1 and max(self.times.values(), default=0) <= 1
        odd = {n: True for n, param in self._written.items() if not (once and alone(param))}
        for name in _by_name(comm, odd, "compare writes"):
            hint = "What it holds would depend on the split. Take out what writes it (max_norm of "
            hint += "an embedding), or do that after each step."
            raise ConfigError("model", f"forward writes its parameter {name}", "no writes", hint)


class Kept:
    """The buffers of some modules, by name, as they are when it is made.

    What a forward writes to them, such as the vectors of a spectral norm, averages of samples or
    counts, may depend on how often a step calls it, and with which samples.
    """

    def __init__(self, layers: Mapping[int, nn.Module], calls: Calls) -> None:
        """``calls``: of these layers since then."""
        self._layers, self._calls = layers, calls
        self._before = {
            number: {name: (buffer, buffer._version) for name, buffer in _buffers(number, module)}
            for number, module in layers.items()
        }

    def refuse_odd(self, comm: Comm) -> None:
        """Of a step since then. Collective.

        Raises:
            ConfigError: forward wrote to a buffer, when it was computed several times or not the
                same on all processes that have it.
        """
        held = {
            name: [self._written(number, name, buffer), self._calls.times[number]]
            for number, module in self._layers.items()
            for name, buffer in _buffers(number, module)
        }
        for name, ranks in _by_name(comm, held, "compare buffers").items():
            found = {digest for digest, _ in ranks.values()}
            once = len(found) == 1 and max(many for _, many in ranks.values()) == 1
            if found != {""} and not once:
                hint = "What it holds would depend on the split, on passes and on recomputing. "
                hint += "Keep it outside of the model, or let no step change it (module.eval())."
                expected = "one that it does not write, or writes alike: once a step everywhere"
                raise ConfigError("model", f"forward writes its buffer {name}", expected, hint)

    def _written(self, number: int, name: str, buffer: Tensor) -> str:
        """Its digest; "" where it is as it was, or of another shape: made for a batch's."""
        before, version = self._before[number].get(name, (buffer, buffer._version))
        if buffer is before:
            return "" if buffer._version == version else digest_of([buffer])
        old, new = digest_of([before]), digest_of([buffer])
        return "" if before.shape != buffer.shape or old == new else new


def _buffers(number: int, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return named({number: module}, nn.Module.named_buffers)


def named(
    layers: Mapping[int, nn.Module],
    of: Callable[[nn.Module], Iterable[tuple[str, Tensor]]] = nn.Module.named_parameters,
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of layers by name; a whole model is layer 0, whose names have no number."""
    for number, module in layers.items():
        for name, tensor in of(module):
            yield f"layers.{number}.{name}".removeprefix("layers.0."), tensor


def _numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Settings of a group of parameters, as JSON can say them."""
    for key, value in group.items():
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if key not in OF_THE_MACHINE and isinstance(plain, int | float | str | tuple | list):
            yield key, json.loads(json.dumps(plain, default=str))


def _by_name(comm: Comm, mine: Mapping[str, Any], what: str) -> dict[str, dict[int, Any]]:
    """For each name the value of every rank that has one; of one rank where all have the same."""
    if same_everywhere(comm, mine, name=what):
        return {name: {comm.rank: value} for name, value in mine.items()}
    every = comm.gather_json(mine, name=f"{what} in full")
    return {
        name: {rank: facts[name] for rank, facts in enumerate(every) if name in facts}
        for name in dict.fromkeys(chain(*every))
    }

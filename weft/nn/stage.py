"""What the runtime knows of a model: stages made of units, trees of tensors, an objective.

Nothing here says what a model computes. A family implements ``Stage`` and ``Objective``; whatever
gathers, recomputes, compiles, cuts or moves a model goes through them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from weft.nn.context import Context
from weft.plan.model import UnitName

Tree = Mapping[str, Tensor]
"""Tensors by name, each with the samples along its first dimension."""

STREAM = "stream"
"""The usual name of the one tensor that most models pass from unit to unit."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What is known of some samples: inputs, targets and weights alike. There may be none."""

    tensors: Tree
    """What the first stage computes on and what the objective compares with."""
    context: Context = field(default_factory=Context)
    """What every stage may ask for."""

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def rows(self, rows: slice) -> MicroBatch:
        """Some of the samples."""
        return MicroBatch(rows_of(self.tensors, rows), self.context.rows(rows))


def rows_of(tree: Tree, rows: slice) -> dict[str, Tensor]:
    """Some of a tree's samples."""
    return {name: tensor[rows] for name, tensor in tree.items()}


class Term(NamedTuple):
    """A share of a loss. Shares of all parts of a batch are added before anything is divided."""

    total: Tensor
    """Sum of weight times loss, a scalar with a gradient."""
    weight: Tensor
    """Sum of weights, a scalar. Zero for a term that is measured in another one's weights."""


Terms = Mapping[str, Term]
"""What a step minimizes is the sum of all totals over the sum of all weights, of the whole job."""


class Output(NamedTuple):
    """What a stage made of some samples."""

    tree: Tree
    """What crosses to the next stage; of the last stage what the objective takes."""
    terms: Terms = MappingProxyType({})
    """What the stage itself adds to the loss, such as a balance of experts."""


class Objective(Protocol):
    """What becomes of the last unit's output."""

    def __call__(self, output: Tree, batch: Tree, /) -> Terms:
        """Sums over the samples of one microbatch, never means. It may have no samples."""


class Begun(NamedTuple):
    """What a part of the last unit made of one microbatch."""

    found: Tree
    """For all parts: together they know the loss."""
    rest: Callable[[Sequence[Tree]], Terms]
    """From what the parts have found, in their order, to the whole loss. Its gradient is that of
    this part: all parts' add up."""


class PartObjective(Protocol):
    """What becomes of the output of the last unit where several stages have a part of it each."""

    def __call__(self, output: Tree, batch: Tree, /) -> Begun:
        """As ``Objective`` in two steps."""


@runtime_checkable
class InParts(Protocol):
    """A stage that can be such a part."""

    def part_objective(self, output: Tree, batch: Tree, /) -> Begun:
        """A ``PartObjective``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """A tensor of a model that is no parameter, and how it stays the same under every split.

    While a step is computed everybody sees the value that it began with.
    """

    name: str
    """Dotted name in the unsplit model."""
    rule: Literal["constant", "sum", "mean", "count"]
    """``constant``: forwards leave it alone. ``sum``: what the forwards of a step add to it is
    summed over the whole batch. ``mean``: that sum, divided by the samples of the batch, takes the
    place of a part ``momentum`` of its value. ``count``: that sum is told of the step, in whole
    numbers, and the value stays."""
    value: Callable[[], Tensor]
    """Where it starts."""
    momentum: float = 1.0
    over: str = ""
    """What is added of a sample is a sum over this dimension of it: who computes a part of it adds
    a part. Empty: what is added is of whole samples alone, and nobody may compute a part."""
    moves: tuple[str, float] | None = None
    """A parameter that a ``count`` settles, of its shape, and how far: up where the count is below
    the mean, down where it is above."""


Call = Callable[..., Any]
"""A unit's forward: any arguments; the result is a tensor, or a tuple or mapping of them."""


class Unit:
    """What is gathered, recomputed, compiled and put off together. A stage computes by calling it.

    Args:
        call: Its forward.
        block: The module that ``call`` is, where the unit is one of many alike: settings for
            blocks (recompute, compile, deferred weight gradients) apply to those alone.
        backward_reads: Its backward needs its parameters (that of an embedding does not).
        draws: Its forward draws from PyTorch's random state, so recomputing restores that.
        may_defer: Weight gradients of the block's linear layers can wait.
    """

    def __init__(
        self,
        call: Call,
        *,
        block: nn.Module | None = None,
        backward_reads: bool = True,
        draws: bool = False,
        may_defer: bool = True,
    ) -> None:
        self.block = block
        self.backward_reads = backward_reads
        self.draws = draws
        self.may_defer = may_defer
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def replace(self, block: nn.Module) -> None:
        """Compute with ``block`` from now on. To be done before anything is wrapped around."""
        if self._call is self.block:
            self._call = block
        self.block = block

    def wrap(self, wrapper: Callable[[Call], Call]) -> None:
        """Put something around the forward: ``wrapper`` makes the new one from the old."""
        self._call = wrapper(self._call)

    def compile(self) -> None:
        """Compile the forward as it is now."""
        assert isinstance(self._call, nn.Module), "only modules are compiled"
        self._call.compile()


class Part:
    """A part of a block that can be computed again by itself: the block calls it as a function.

    ``of`` calls modules as it finds them then, for others may take their places.
    """

    def __init__(self, of: Call) -> None:
        self.call = of

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def parts_of(block: nn.Module) -> dict[str, list[Part]]:
    """The parts that a block and the modules in it name as attributes, by that name: experts have
    what an expert beside them, which every token visits, has too."""
    found: dict[str, list[Part]] = {}
    for module in block.modules():
        for name, value in vars(module).items():
            if isinstance(value, Part):
                found.setdefault(name, []).append(value)
    return found


class Stage(Protocol):
    """Consecutive units of a model."""

    @property
    def module(self) -> nn.Module:
        """What holds the parameters, under their logical names."""

    @property
    def units(self) -> Mapping[UnitName, Unit]:
        """The units in forward order."""

    @property
    def spans_samples(self) -> bool:
        """Units talk about all samples of a batch: they compute even where they have none."""

    def compute(self, inputs: Tree, context: Context, /) -> Output:
        """The batch's tensors on the first stage, else what crossed the border before it."""


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors that a unit takes or gives."""
    if isinstance(result, Tensor):
        return [result]
    parts: Iterable[Any] = result.values() if isinstance(result, Mapping) else ()
    if isinstance(result, tuple | list):
        parts = result
    return [tensor for part in parts for tensor in tensors_in(part)]


def total_of(terms: Terms) -> Tensor | None:
    """The sum of all totals; None without terms."""
    totals = [term.total for term in terms.values()]
    return None if not totals else totals[0] if len(totals) == 1 else _sum(totals)


def added(parts: Iterable[Terms]) -> dict[str, Term]:
    """The terms of several parts of a batch, or of several makers, by name."""
    found: dict[str, list[Term]] = {}
    for terms in parts:
        for name, term in terms.items():
            found.setdefault(name, []).append(term)
    return {
        name: same[0] if len(same) == 1 else Term(*map(_sum, zip(*same, strict=True)))
        for name, same in found.items()
    }


def _sum(scalars: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(scalars)).sum()

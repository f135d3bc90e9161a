"""What an optimizer is: what it keeps for every parameter, and how one update changes both.

A rule is one folder of this package, whose module ``optimizer`` has its ``OPTIMIZER``. It sees
main parameters, the boxes of logical tensors that this rank updates, and need not know how they
are split: element by element it does the same to each; sums of squares over whole logical tensors,
rows and columns it may ask for, and what a function makes of whole ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.parallel.mains import MainParam
from weft.parallel.norms import TensorNorms
from weft.parallel.wholes import Kept, WholeTensors
from weft.plan.model import ParamSpec

Dims = tuple[int, ...]
"""Dimensions of a parameter that a state tensor has too: all of them for one of its shape, none
for one number a logical tensor."""


def every_dim(spec: ParamSpec) -> Dims:
    """The state has the shape of the parameter."""
    return tuple(range(len(spec.shape)))


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Main parameters that are updated with the same numbers, all on one device."""

    mains: Sequence[MainParam]
    lr_scale: float
    weight_decay: float
    states: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    """By name, one tensor for each of ``mains``."""

    @property
    def values(self) -> list[Tensor]:
        return [main.value for main in self.mains]

    @property
    def grads(self) -> list[Tensor]:
        """Of the clipped mean loss of the whole job."""
        return [main.grad for main in self.mains if main.grad is not None]


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """One update of everything that this rank updates."""

    groups: Sequence[Group]
    """Empty on a rank that updates nothing; it takes part in sums of squares all the same."""
    lr: float
    """To be multiplied by each group's scale."""
    count: Tensor
    """Updates done, this one included: fp32 scalar on the device."""
    skip: Tensor
    """fp32 scalar on the device: 1 where nothing may change, else 0."""
    norms: TensorNorms
    wholes: WholeTensors

    def squared_norms(self, *quantities: Sequence[Sequence[Tensor]]) -> list[list[list[Tensor]]]:
        """Sums of squares over whole logical tensors: parameters, gradients, steps, what is asked.

        Each quantity has a list for each group with a tensor for each of its mains, of its shape;
        so has the result, with fp64 scalars. Collective, one reduction for all of them: a rule
        calls it on every rank, whether it has groups or not.
        """
        mains = [main for group in self.groups for main in group.mains]
        flat = [[tensor for tensors in each for tensor in tensors] for each in quantities]
        found = []
        for sums in self.norms.squares(mains, flat):
            rest = iter(sums)
            found.append([[next(rest) for _ in group.mains] for group in self.groups])
        return found

    def squares_along(
        self, tensors: Sequence[Sequence[Tensor]], kept: Kept
    ) -> list[list[list[Tensor]]]:
        """Sums of squares over whole logical tensors, rows or columns of them, say.

        Args:
            tensors: A list for each group, with a tensor for each of its mains, of its shape.
            kept: From a parameter, the dimensions that each sum of it still has; the result has
                such sums for each main, fp64, as far as they lie in the main's box.

        Collective, one reduction: a rule calls it on every rank, whether it has groups or not.
        """
        mains = [main for group in self.groups for main in group.mains]
        found = self.wholes.squares_along(mains, [t for each in tensors for t in each], kept)
        rest = iter(found)
        return [[next(rest) for _ in group.mains] for group in self.groups]


def take_over(tensors: Sequence[Tensor], new: Sequence[Tensor], skip: Tensor) -> None:
    """Write ``new`` into ``tensors``, unless ``skip`` is 1: without asking the host, and without
    harm where ``new`` is no number.
    """
    is_kept = skip > 0
    for tensor, value in zip(tensors, new, strict=True):
        torch.where(is_kept, tensor, value, out=tensor)


class Rule(ABC):
    """An optimizer.

    ``skips_on_device``: where ``skip`` is 1 an update leaves everything as it is, without asking
    the host. Of another rule the host waits for each step's weight and leaves out the update.
    ``takes_wholes``: some parameters are such that ``takes_whole``.
    """

    skips_on_device = False
    takes_wholes = False

    def takes_whole(self, _spec: ParamSpec) -> bool:
        """An update needs the whole logical tensor at once (``Update.wholes``)."""
        return False

    @abstractmethod
    def state(self, spec: ParamSpec) -> Mapping[str, Dims]:
        """What is kept for a parameter, by the name that checkpoints use. It starts at zero."""

    @abstractmethod
    def update(self, update: Update) -> None:
        """Change values and states in place. Gradients may be overwritten."""

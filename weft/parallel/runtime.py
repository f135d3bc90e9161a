"""What an axis has to bring so that modules compute divided along it.

The only way activations change how they lie along an axis is its table of changes; the only way a
module computes with a part of a dimension that it sums over is the split form of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.plan.layout import Placement


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """The ranks along one axis around this rank, in the axis's order."""

    comm: Comm
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def position(self) -> int:
        """Of this rank."""
        return self.ranks.index(self.comm.rank)


@dataclass(frozen=True, slots=True)
class Lying:
    """How a tensor lies along an axis."""

    placement: Placement
    parts: tuple[int, ...] = ()
    """Elements of the divided dimension that each rank of the group holds."""


Change = Callable[[Tensor], Tensor]
"""From this rank's tensor before to the one after; differentiable."""

Changes = Mapping[
    tuple[type[Placement], type[Placement]], Callable[[AxisGroup, Lying, Lying], Change]
]
"""What makes the change of a tensor that lies in one way and has to lie in another."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A module's sum over a dimension that the axis divides."""

    group: AxisGroup
    first: int
    """The first element of the dimension that this rank holds."""
    complete: Change | None
    """From this rank's term to what the module gives; None where the layout says nothing of it."""


SplitForm = Callable[[nn.Module, Sum], nn.Module]
"""From a module that holds a part of its parameters to one that gives the whole one's results."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """One axis at work."""

    changes: Changes
    split_forms: Mapping[type[nn.Module], SplitForm]
    """By the kind of module; a kind that is not named computes with a part as it is."""

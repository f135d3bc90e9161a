"""What an axis has to bring so that modules compute divided along it.

The only way activations change how they lie along an axis is its table of changes; the only way a
module computes with a part of a dimension that it sums over is the split form of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from weft.axes.held import Ranges
from weft.comm.comm import Comm
from weft.plan.layout import Placement
from weft.plan.plan import Scores


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """The ranks along one axis around this rank, in the axis's order."""

    comm: Comm
    ranks: tuple[int, ...]
    pieces: int = 1
    """In how many pieces modules hand a divided dimension round, where they can."""
    near_ways: int = 1
    """How many neighbours talk among themselves first, or apart."""
    scores: Scores = "blocks"
    """What ranks make of scores where keys go round."""
    cast: str = ""
    """What they send one another where experts are is cast to this."""
    cast_between: str = ""
    """``nodes``: only among ranks of several machines."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def position(self) -> int:
        """Of this rank."""
        return self.ranks.index(self.comm.rank)

    @property
    def near(self) -> AxisGroup:
        """This rank's neighbours, which do so."""
        return self._of(squared(self.ranks, self.near_ways)[0])

    @property
    def far(self) -> AxisGroup:
        """Of each such group the rank at the same place."""
        return self._of(squared(self.ranks, self.near_ways)[1])

    def _of(self, groups: Iterable[tuple[int, ...]]) -> AxisGroup:
        ranks = next(ranks for ranks in groups if self.comm.rank in ranks)
        return AxisGroup(self.comm, ranks, scores=self.scores)


def squared(ranks: tuple[int, ...], side: int) -> tuple[list[tuple[int, ...]], ...]:
    """Groups of so many neighbours, and of those at the same place in each group."""
    near = [ranks[first : first + side] for first in range(0, len(ranks), side)]
    return near, [ranks[place::side] for place in range(side)]


@dataclass(frozen=True, slots=True)
class Lying:
    """How a tensor lies along an axis."""

    placement: Placement
    held: tuple[Ranges, ...] = ()
    """What each rank of the group has of the divided dimension, as places in what all of them have
    together, in the order in which it stores them."""

    @property
    def parts(self) -> tuple[int, ...]:
        """How many elements of it each rank has."""
        return tuple(sum(map(len, ranges)) for ranges in self.held)


Change = Callable[[Tensor], Tensor]
"""From this rank's tensor before to the one after; differentiable."""

Changes = Mapping[
    tuple[type[Placement], type[Placement]], Callable[[AxisGroup, Lying, Lying], Change]
]
"""What makes the change of a tensor that lies in one way and has to lie in another."""


class Pieces(Protocol):
    """A dimension divided along an axis, which is put together and divided again piece by piece:
    one is on its way while modules compute with another."""

    def completed(self, term: Change, x: Tensor, /) -> Tensor:
        """This rank's part of the sum of all ranks' ``term(x)``, where ``x`` is whole."""

    def made_by(self, module: nn.Module, last: str, /) -> nn.Module:
        """What takes its part of what ``module`` takes whole, and gives the same. ``last`` names
        the split form inside it whose sum is what it gives."""

    def read_by(self, module: nn.Module, names: Sequence[str], /) -> None:
        """Let ``module`` take its part of what it took whole, which it only hands to the modules
        inside it that are named."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A module's sum over a dimension that the axis divides."""

    group: AxisGroup
    held: Ranges
    """The elements of the dimension that this rank holds, in the order in which it stores them."""
    parts: tuple[Ranges, ...]
    """What each rank of the group holds, as places in what all of them hold together."""
    complete: Change | None
    """From this rank's term to what the module gives; None where the layout says nothing of it."""
    pieces: Pieces | None = None
    """The same in pieces of what the module takes, where the axis is asked for that."""

    @property
    def first(self) -> int:
        """The first element, for a form that takes consecutive ones alone."""
        assert len(self.held) == 1, f"several ranges: {self.held}"
        return self.held[0].start


SplitForm = Callable[[nn.Module, Sum], nn.Module]
"""From a module that holds a part of its parameters to one that gives the whole one's results."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """One axis at work."""

    changes: Changes
    split_forms: Mapping[type[nn.Module], SplitForm]
    """By the kind of module; a kind that is not named computes with a part as it is."""
    pieces: Callable[[AxisGroup, Lying], Pieces] | None = None
    """Of a divided dimension; None where everything goes at once."""

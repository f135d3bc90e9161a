"""What an axis of a mesh has to say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

from weft.config.errors import ConfigError
from weft.plan.layout import SAMPLES, Dim, Form, Placement
from weft.plan.plan import StagePlan
from weft.plan.tiling import part_of, split_by_weight


class Axis(ABC):
    """One way to divide a stage among ranks. Its size is the number of parts.

    An axis divides some logical dimensions in some forms; all else is the same along it.
    """

    name: str
    """As in ``weft.config.axes``."""
    changes: Collection[tuple[type[Placement], type[Placement]]] = ()
    """The changes of placement along it that its runtime makes, from and to."""
    kinds: Mapping[str, str] = MappingProxyType({})
    """Names of the classes of modules that its runtime lets compute with a part of a dimension
    that they sum or mix, and of the classes of what then stands in their place."""

    otherwise: str = ""
    """What would do for a module of another kind that mixes such a dimension."""

    in_pieces: bool = False
    """What ranks along it gather and sum inside modules may go in pieces, beside products."""

    near_key: str = ""
    """Of a stage, what says how many neighbours along it talk among themselves first, or apart."""

    def near_ways(self, stage: StagePlan, nodes: Sequence[str]) -> int:  # noqa: ARG002
        """How many those are, of ranks on such machines; 1: it makes no difference who is near."""
        return 1

    def pieces(self, stage: StagePlan) -> int:
        """In how many pieces a stage asks for what goes along it inside modules."""
        return stage.pieces

    @abstractmethod
    def divides(self, dim: Dim, form: Form) -> bool:
        """Ranks along the axis hold parts of such a dimension.

        Of what travels between modules (``stream``) every axis divides something: only so does each
        rank have one term of every gradient, at borders between stages too.
        """

    def part(
        self,
        dim: Dim,
        ways: int,
        position: int,
        shares: Sequence[int] = (),
    ) -> tuple[range, ...]:
        """The elements of a divided dimension that one position holds, in the order in which it
        stores them: one range, or several where an even load needs it. None may be empty but one
        that is alone. ``shares``: of a mesh, by position."""
        return (consecutive(dim, ways, position, shares),)

    @abstractmethod
    def allows(self, dims: Iterable[Dim], ways: int) -> bool:
        """The axis can have this size for a model with these dimensions."""

    @abstractmethod
    def check(self, dims: Iterable[Dim], ways: int, key: str) -> None:
        """Refuse a size that the axis cannot have.

        Raises:
            ConfigError: ``key`` says where the size was written; what would do is in the message.
        """


def most_samples(dims: Iterable[Dim]) -> int | None:
    """Of a microbatch, where its number of samples is known."""
    return min((dim.size for dim in dims if dim.size and dim.name == SAMPLES.name), default=None)


def check_samples(dims: Iterable[Dim], ways: int, key: str) -> None:
    """Each of so many ranks has a sample.

    Raises:
        ConfigError: one has none.
    """
    most = most_samples(dims)
    if most is not None and ways > most:
        expected = f"at most the samples of a micro-batch ({most})"
        raise ConfigError(key, ways, expected, "Further ranks would have nothing to do.")


def divisible(dim: Dim, ways: int) -> bool:
    """Every part gets something, no unit is cut, and groups are cut into equal numbers of units."""
    groups = dim.num_groups
    if ways <= groups:
        return True
    if not groups or ways % groups:
        return False
    return dim.shared or dim.units % (ways // groups) == 0


def consecutive(dim: Dim, ways: int, position: int, shares: Sequence[int] = ()) -> range:
    """The ``position``-th of ``ways`` parts: whole groups by weight, or as evenly as they go, or
    then with more parts than groups an equal number of units of one. Where there is too little the
    last are empty."""
    groups = max(1, dim.num_groups)
    width = dim.size // groups
    if shares:
        ends = [0, *accumulate(split_by_weight(dim.num_groups, shares))]
        return range(ends[position] * width, ends[position + 1] * width)
    if ways > groups and divisible(dim, ways):
        several = ways // groups
        if not dim.shared:
            own = dim.size // ways
            return range(position * own, (position + 1) * own)
        group = position // several
        return range(group * width, (group + 1) * width)
    mine = part_of(dim.num_groups, ways, position)
    return range(mine.start * width, mine.stop * width)

"""What an axis of a mesh has to say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from weft.plan.layout import Dim, Form


class Axis(ABC):
    """One way to divide a stage among ranks. Its size is the number of parts.

    An axis divides some logical dimensions in some forms; all else is the same along it.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """As in ``weft.config.axes``."""

    @abstractmethod
    def divides(self, dim: Dim, form: Form) -> bool:
        """Ranks along the axis hold parts of such a dimension."""

    @abstractmethod
    def part(self, dim: Dim, ways: int, position: int) -> tuple[range, ...]:
        """The elements of a divided dimension that one position holds, in the order in which it
        stores them: one range, or several where an even load needs it. None may be empty but one
        that is alone."""

    @abstractmethod
    def allows(self, dims: Iterable[Dim], ways: int) -> bool:
        """The axis can have this size for a model with these dimensions."""

    @abstractmethod
    def check(self, dims: Iterable[Dim], ways: int, key: str) -> None:
        """Refuse a size that the axis cannot have.

        Raises:
            ConfigError: ``key`` says where the size was written; what would do is in the message.
        """

"""Data parallelism: each rank computes its own samples of a microbatch with all parameters."""

from __future__ import annotations

from collections.abc import Iterable

from weft.axes.axis import Axis
from weft.config.errors import ConfigError
from weft.plan.layout import Dim, Form


class DataParallel(Axis):
    """Divides the samples of every activation, and no parameter."""

    name = "dp"

    def divides(self, dim: Dim, form: Form) -> bool:
        return dim.name == "samples" and form != "param"

    def allows(self, dims: Iterable[Dim], ways: int) -> bool:
        return ways >= 1 and all(ways <= most for most in self._samples(dims))

    def check(self, dims: Iterable[Dim], ways: int, key: str) -> None:
        for most in self._samples(dims):
            if ways > most:
                expected = f"at most the samples of a micro-batch ({most})"
                raise ConfigError(key, ways, expected, "Further ranks would have nothing to do.")

    def _samples(self, dims: Iterable[Dim]) -> list[int]:
        """Of a microbatch, where its number of samples is known."""
        return [dim.size for dim in dims if dim.size and self.divides(dim, "stream")]


AXIS = DataParallel()

"""Data parallelism: each rank computes its own samples of a microbatch with all parameters."""

from __future__ import annotations

from collections.abc import Iterable

from weft.axes.axis import Axis, check_samples, most_samples
from weft.plan.layout import SAMPLES, Dim, Form


class DataParallel(Axis):
    """Divides the samples of every activation, and no parameter."""

    name = "dp"

    def divides(self, dim: Dim, form: Form) -> bool:
        return dim.name == SAMPLES.name and form != "param"

    def allows(self, dims: Iterable[Dim], ways: int) -> bool:
        most = most_samples(dims)
        return 1 <= ways <= (ways if most is None else most)

    def check(self, dims: Iterable[Dim], ways: int, key: str) -> None:
        check_samples(dims, ways, key)


AXIS = DataParallel()

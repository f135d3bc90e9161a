"""Seconds that grow with layers, as straight lines."""

from __future__ import annotations

from typing import NamedTuple


class Slope(NamedTuple):
    """Seconds: at no layers, and of each layer."""

    base: float
    each: float

    def at(self, layers: float) -> float:
        return self.base + self.each * layers

    def after(self, seconds: float) -> Slope:
        """That begins so much later."""
        return Slope(self.base + seconds, self.each)

    def then(self, many: int, other: Slope) -> Slope:
        """So many times, and the other one once."""
        return Slope(many * self.base + other.base, many * self.each + other.each)


class MeshTimes(NamedTuple):
    """Seconds of a full microbatch on one mesh, all its stages together."""

    forward: Slope
    back: Slope
    """Of the input's gradient, where backward is in halves; else all of it."""
    early: Slope
    """Both."""
    whole: Slope
    first_forward: float
    """Of its first stage without layers; and the backward."""
    first_back: float

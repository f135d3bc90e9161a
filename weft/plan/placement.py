"""How one tensor lies along one axis of a mesh."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Divided along tensor dimension ``dim``."""

    dim: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """The same on every rank of the axis."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a term; the tensor is their sum."""


Placement = Shard | Replicate | Partial

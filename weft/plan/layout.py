"""How modules sit on a mesh axis, as data beside each model family. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Shard:
    """Split along tensor dimension ``dim``, into consecutive parts as even as whole units allow."""

    dim: int
    by: Literal["element", "head", "kv_head"] = "element"
    """What is never cut: a head's channels go together, and query heads with the key and value
    head they share. Where there are fewer key heads than parts, a key head is held by several."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """The same whole tensor on every rank of the axis."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a term; the tensor is their sum."""


Placement = Shard | Replicate | Partial


@dataclass(frozen=True, slots=True)
class Layout:
    """One module on the tensor-parallel axis.

    ``params`` says where its own parameters sit (absent: replicated), ``takes`` what the module
    wants its input to be and ``gives`` what its output becomes at the module's edge (None: as is).
    """

    params: Mapping[str, Placement] = field(default_factory=dict)
    takes: Placement | None = None
    gives: Placement | None = None

"""What two checkpoints hold that is not the same, whatever plans saved them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.checkpoint.entry import JSON
from weft.checkpoint.reader import Checkpoint

_NEVER_ALIKE = ("plan", "config")
"""Parts of the state that say how a checkpoint came about, not what it is."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor, or one value of the state, that differs."""

    what: str
    """``param/norm.weight``, ``state/seed``."""
    problem: str
    """In words."""
    elements: int = 0
    """How many differ, where shapes agree."""
    largest: float | None = 0.0
    """Difference of two of them; None where one alone is no number."""


def differences(first: Checkpoint, second: Checkpoint) -> Iterator[Difference]:
    """Number by number, and whether they are stored in the same dtype; one tensor at a time.

    Raises CheckpointError where a file is damaged.
    """
    yield from _of_state(first.state, second.state)
    tensors = dict.fromkeys([*first.index.tensors, *second.index.tensors])
    for kind, name in tensors:
        what = f"{kind}/{name}"
        holders = [(kind, name) in each.index.tensors for each in (first, second)]
        if not all(holders):
            yield Difference(what, f"only in the {'first' if holders[0] else 'second'}")
            continue
        shapes = first.shape(name, kind), second.shape(name, kind)
        if shapes[0] != shapes[1]:
            yield Difference(what, f"shape {shapes[0]} and {shapes[1]}")
            continue
        yield from _of_elements(what, first.read(name, kind), second.read(name, kind))


def _of_state(first: Mapping[str, JSON], second: Mapping[str, JSON]) -> Iterator[Difference]:
    for key in dict.fromkeys([*first, *second]):
        if key not in _NEVER_ALIKE and first.get(key) != second.get(key):
            yield Difference(f"state/{key}", f"{first.get(key)!r} and {second.get(key)!r}")


def _of_elements(what: str, first: Tensor, second: Tensor) -> Iterator[Difference]:
    dtype = ""
    if first.dtype != second.dtype:
        dtype = f"{first.dtype} and {second.dtype}".replace("torch.", "") + ": "
    a, b = first.double(), second.double()
    is_exact = first.dtype == second.dtype and not first.is_floating_point()
    unlike = first != second if is_exact else a != b  # fp64 has not every int64
    differ = unlike & ~(a.isnan() & b.isnan())
    elements = int(differ.sum())
    if not elements:
        if dtype:
            yield Difference(what, f"{dtype}the same numbers")
        return
    largest = float(torch.where(differ, (a - b).abs(), 0.0).max())
    is_number = math.isfinite(largest)
    gap = f"by up to {largest:.3g}" if is_number else "some no numbers in one alone"
    place = list(map(int, differ.nonzero()[0]))
    values = f"{float(a[tuple(place)])!r} and {float(b[tuple(place)])!r}"
    problem = f"{dtype}{elements} of {a.numel()} elements, {gap}; the first at {place}: {values}"
    yield Difference(what, problem, elements, largest if is_number else None)

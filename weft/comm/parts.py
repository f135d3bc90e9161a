"""Which elements of a flat tensor are whose: arithmetic of collectives on parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sizes_of(flat: Tensor, group: Sequence[int], sizes: Sequence[int]) -> Sequence[int]:
    """Elements of each rank's part of ``flat``; equal parts where ``sizes`` does not say them."""
    sizes = sizes or [flat.numel() // len(group)] * len(group)
    assert (len(sizes), sum(sizes)) == (len(group), flat.numel()), f"{sizes} of {flat.numel()}"
    return sizes


def ascending_places(group: Sequence[int]) -> list[int]:
    """The group's positions by rank, ascending, as a backend numbers them."""
    return sorted(range(len(group)), key=group.__getitem__)


def flat_of(parts: Sequence[Tensor], ascending: Sequence[int]) -> Tensor:
    """Contiguous: what goes to each rank, in ascending order. One message alone is not copied."""
    flat = [parts[i].reshape(-1) for i in ascending]
    there = [part for part in flat if part.numel()]
    return there[0] if len(there) == 1 else torch.cat(flat)


def pieces_of(
    flat: Tensor, counts: Sequence[int], ascending: Sequence[int], sizes: Sequence[Sequence[int]]
) -> list[Tensor]:
    """What came of each rank in ascending order, in the group's order and shaped."""
    pieces = dict(zip(ascending, torch.split(flat, list(counts)), strict=True))
    return [pieces[i].view(*size) for i, size in enumerate(sizes)]

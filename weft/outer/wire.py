"""What outer gradients travel in: as they are, in two bytes, or in one with a scale for each row.

Every site uses what came out of the code, its own part included: so all add the same bits. A row is
one of the whole tensor, wherever it is split, so the numbers do not depend on a site's plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

MOST = 127
"""Largest code of a value in one byte."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A code of values."""

    dtype: torch.dtype
    has_scales: bool = False
    """A value is a whole number of steps, as long as its row's scale says."""

    def encode(self, values: Tensor, scales: Tensor | None) -> Tensor:
        """``scales``: as ``by_rows`` gives them."""
        if scales is None:
            return values.to(self.dtype)
        return (values / scales).round_().clamp_(-MOST, MOST).to(self.dtype)

    def decode(self, codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The values, a new tensor."""
        values = codes.to(dtype, copy=True)
        return values if scales is None else values.mul_(scales.to(dtype))


WIRES: Mapping[str, Wire] = {
    "fp64": Wire(torch.float64),
    "fp32": Wire(torch.float32),
    "bf16": Wire(torch.bfloat16),
    "int8": Wire(torch.int8, has_scales=True),
}


def num_rows(size: tuple[int, ...]) -> int:
    """Rows of a tensor, or of a box of one; a vector is one."""
    return size[0] if len(size) > 1 else 1


def by_rows(scales: Tensor, size: tuple[int, ...]) -> Tensor:
    """One scale for each row of a box of this size, to go with its values."""
    return scales.view(-1 if len(size) > 1 else 1, *[1] * (len(size) - 1)) if size else scales[0]


def peaks(values: Tensor) -> Tensor:
    """``[rows]``: largest size of each row's values, fp32; infinite where one is no number, which a
    maximum over ranks may lose. Then none of the row comes out as one."""
    rows = values.reshape(num_rows(tuple(values.shape)), -1)
    if not rows.numel():
        return torch.zeros(len(rows), dtype=torch.float32, device=values.device)
    return rows.abs().amax(dim=1).float().nan_to_num(nan=inf, posinf=inf)


def scales_of(largest: Tensor) -> Tensor:
    """Of rows whose values are at most so large; a row of zeros has some scale."""
    return torch.where(largest == 0, 1.0, largest / MOST)

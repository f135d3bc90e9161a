"""What may travel in fewer bits than it is computed with, where somebody asks for it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

BLOCK = 128
"""Elements of a row of a flat tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cast:
    """How numbers travel: rounded once, and used as what they were rounded to."""

    factors: str
    """Dtype in torch of activations."""
    gradients: str
    value_bytes: int
    row_bytes: int = 0
    """Of the scale of each row: a power of two, as one exponent. 0: there are none."""

    def num_bytes(self, values: float, rows: float) -> float:
        """Of so many values in so many rows."""
        return values * self.value_bytes + rows * self.row_bytes


CASTS: Mapping[str, Cast] = MappingProxyType(
    {
        "bf16": Cast(factors="bfloat16", gradients="bfloat16", value_bytes=2),
        "fp8": Cast(factors="float8_e4m3fn", gradients="float8_e5m2", value_bytes=1, row_bytes=1),
    }
)

"""What crosses the border between two stages, as a family describes it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from weft.plan.layout import Dim

DtypeRole = Literal["compute", "int64", "int32", "bool"]
"""``compute``: floating point in the precision of the stage, and with a gradient. Others go
forward only."""


@dataclass(frozen=True, slots=True)
class BorderTensor:
    """One tensor that crosses, in its stream form."""

    dims: tuple[Dim, ...]
    """Those after the samples."""
    role: DtypeRole = "compute"

    @property
    def has_grad(self) -> bool:
        """A gradient comes back."""
        return self.role == "compute"


Border = Mapping[str, BorderTensor]
"""All that crosses one border, by name."""

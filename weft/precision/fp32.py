"""Everything in single precision."""

from __future__ import annotations

from weft.precision.roles import Roles

PRECISION = Roles.of("fp32", 1, "float32", "float32")

"""The reference: everything in double precision."""

from __future__ import annotations

from weft.precision.roles import Roles

PRECISION = Roles.of("fp64", 0, "float64", "float64")

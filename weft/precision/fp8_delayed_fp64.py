"""The reference of ``fp8-delayed``: the same eight bits, and all else in double precision."""

from __future__ import annotations

from weft.precision.roles import Roles

PRECISION = Roles.of("fp8-delayed-fp64", 11, "float64", "float64", products="delayed")

"""As ``fp8``, with a scale for what each sum of a product is over."""

from __future__ import annotations

from weft.precision.roles import Roles

PRECISION = Roles.of("fp8-rowwise", 5, "bfloat16", "float32", products="rowwise")

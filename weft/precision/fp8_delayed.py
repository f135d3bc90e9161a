"""As ``fp8``, scaled by the largest numbers of earlier steps (arXiv 2209.05433)."""

from __future__ import annotations

from weft.precision.roles import Roles

PRECISION = Roles.of("fp8-delayed", 10, "bfloat16", "float32", products="delayed")

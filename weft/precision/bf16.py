"""bfloat16 arithmetic (arXiv 1905.12322); sums and master weights in single precision."""

from __future__ import annotations

from weft.precision.roles import Roles

PRECISION = Roles.of("bf16", 2, "bfloat16", "float32")

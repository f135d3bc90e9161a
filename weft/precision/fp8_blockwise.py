"""As ``fp8``, with scales for blocks of 1x128, of weights 128x128 (arXiv 2412.19437)."""

from __future__ import annotations

from weft.precision.roles import Roles

PRECISION = Roles.of("fp8-blockwise", 6, "bfloat16", "float32", products="blockwise")

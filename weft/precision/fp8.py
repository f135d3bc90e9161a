"""bfloat16, and linear layers multiply in eight bits (arXiv 2209.05433), one scale a sample."""

from __future__ import annotations

from weft.precision.roles import Roles

PRECISION = Roles.of("fp8", 4, "bfloat16", "float32", products="tensorwise")

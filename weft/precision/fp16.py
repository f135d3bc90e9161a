"""IEEE half precision; sums and master weights in single precision, the loss scaled
(arXiv 1710.03740): for chips that are fast in two bytes and have no bfloat16."""

from __future__ import annotations

from weft.precision.roles import Roles

PRECISION = Roles.of("fp16", 3, "float16", "float32", scales_loss=True)

"""What "auto" makes of ``compute.precision``: the fast format that all chips have."""

from __future__ import annotations

from collections.abc import Iterable

from weft.cluster.cluster import HOST, Chip
from weft.plan.plan import Precision


def usual_precision(chips: Iterable[Chip], *, cpu_bf16: bool) -> Precision:
    """Of a job on these chips. ``cpu_bf16``: processors among them multiply bf16 by instruction.

    Chips of two-byte products without bf16 (V100, T4) get fp16, whose loss is scaled.
    """
    found = list(chips)
    if not cpu_bf16 and any(chip.device == HOST for chip in found):
        return "fp32"
    others = [chip for chip in found if chip.device != HOST]
    return "fp16" if any(chip.emulates_bf16 for chip in others) else "bf16"

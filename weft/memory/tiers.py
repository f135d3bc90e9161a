"""Where tensors may be kept, in numbers. No torch."""

from __future__ import annotations

from weft.cluster.cluster import HOST
from weft.precision.roles import Tier

PIECE_BYTES = 64 << 20
"""Brought to the device at a time."""
NUM_ROOMS = 3
"""Pieces that are there at once: one computes, the next arrives, the last one leaves."""
ALIGNMENT = 64
"""Bytes, and elements, that no vector instruction reads across."""


BYTES_PER_S: dict[Tier, float] = {"host": 20e9, "disk": 2e9}
"""Each way between a tier and a device, until it is measured. A disk does one at a time."""


def keeps_apart(tier: Tier, device: str) -> bool:
    """Tensors of a tier are not in the memory of this kind of device. A processor's memory is the
    host's: there is nothing to gain from one in the other."""
    return tier == "disk" or (tier == "host" and device != HOST)

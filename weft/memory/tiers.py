"""Where tensors may be kept, in numbers. No torch."""

from __future__ import annotations

from typing import NamedTuple

from weft.cluster.cluster import HOST
from weft.precision.roles import Tier

APART: tuple[Tier, ...] = ("host", "disk")
PIECE_BYTES = 64 << 20
"""Brought to the device at a time."""
NUM_ROOMS = 3
"""Pieces that are there at once: one computes, the next arrives, the last one leaves."""
ALIGNMENT = 64
"""Bytes, and elements, that no vector instruction reads across."""


class Rates(NamedTuple):
    """Bytes a second of one chip, each way between it and a tier; the defaults are for what neither
    a cluster's file nor the catalogue says. A disk does one way at a time."""

    host: float = 20e9
    disk: float = 2e9

    def of(self, tier: Tier) -> float:
        """Of a tier apart from the device."""
        return self.disk if tier == "disk" else self.host


USUAL = Rates()


def of_gradients(params: Tier, state: Tier, device: str) -> Tier:
    """Where gradients are from backward to their update, by where parameters and what only updates
    need are: where neither is on the device, there too, on the nearer of the two."""
    if keeps_apart(params, device) and keeps_apart(state, device):
        return "host" if "host" in (params, state) else "disk"
    return "device"


def keeps_apart(tier: Tier, device: str) -> bool:
    """Tensors of a tier are not in the memory of this kind of device. A processor's memory is the
    host's: there is nothing to gain from one in the other."""
    return tier == "disk" or (tier == "host" and device != HOST)

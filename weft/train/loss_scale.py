"""A scale of the loss that follows what gradients can bear (arXiv 1710.03740, section 3.2).

It is made of the step's totals over all ranks and stages, so it is the same number everywhere
without a message of its own, and nobody waits for a device to know it.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST = 2.0**16
LARGEST = 2.0**24
CLEAN_STEPS = 2000
"""Steps in a row without overflow after which the scale is doubled."""


class LossScale:
    """The scale of the next step, as a scalar of the device."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), FIRST, dtype=torch.float32, device=device)
        self._clean = torch.zeros((), dtype=torch.float32, device=device)

    def settle(self, finite: Tensor) -> Tensor:
        """Go on to the next step's scale. ``finite``: this step's gradients are numbers, of the
        whole job. The result: they are not, and a smaller scale may help."""
        overflowed = ~finite & (self.value > 1)
        clean = torch.where(finite, self._clean + 1, 0.0)
        grown = torch.where(clean >= CLEAN_STEPS, self.value * 2, self.value)
        smaller = (self.value / 2).clamp(min=1)
        self.value.copy_(torch.where(finite, grown.clamp(max=LARGEST), smaller))
        self._clean.copy_(torch.where(clean >= CLEAN_STEPS, 0.0, clean))
        return overflowed

    def state(self) -> dict[str, float]:
        """What a run goes on with. Waits for the device."""
        return {"value": float(self.value), "clean_steps": float(self._clean)}

    def restore(self, value: float, clean_steps: float) -> None:
        """Go on with what ``state`` gave."""
        self.value.fill_(value)
        self._clean.fill_(clean_steps)

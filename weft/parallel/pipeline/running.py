"""Buffers that forwards add to: the same after a step, however its samples were divided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from weft.nn.stage import Buffer


class RunningBuffers:
    """The buffers of a job that change, and this rank's copies of some.

    Args:
        declared: All of the job, the same on every rank.
        modules: This rank's stages.
        samples: Of a global batch.
    """

    def __init__(
        self, declared: Sequence[Buffer], modules: Sequence[nn.Module], samples: int
    ) -> None:
        self._declared = [buffer for buffer in declared if buffer.rule != "constant"]
        every = {name: tensor for module in modules for name, tensor in module.named_buffers()}
        self._held = {b.name: every[b.name] for b in self._declared if b.name in every}
        self._samples = samples
        self._added = {  # beside what is added, so that nothing waits for the device
            b.name: b.value().double().zero_().to(self._held[b.name].device)
            if b.name in self._held
            else b.value().double().zero_()
            for b in self._declared
        }

    @property
    def names(self) -> Sequence[str]:
        """Of all in the job."""
        return list(self._added)

    def begin(self) -> None:
        """Nothing was added in this step yet."""
        for added in self._added.values():
            added.zero_()

    @contextmanager
    def unchanged(self, *, counts: bool) -> Iterator[None]:
        """Take back what is added inside; ``counts``: it belongs to the step's sums."""
        before = {name: tensor.clone() for name, tensor in self._held.items()}
        yield
        with torch.no_grad():
            for name, tensor in self._held.items():
                if counts:
                    self._added[name] += (tensor - before[name]).double().to(self._added[name])
                tensor.copy_(before[name])

    def sums(self, device: torch.device) -> list[Tensor]:
        """What this rank's forwards added, flat; zeros for what other ranks hold."""
        return [added.flatten().to(device) for added in self._added.values()]

    @torch.no_grad()
    def settle(self, totals: Tensor) -> None:
        """New values from the sums over all ranks."""
        sizes = [added.numel() for added in self._added.values()]
        for buffer, total in zip(self._declared, torch.split(totals, sizes), strict=True):
            held = self._held.get(buffer.name)
            if held is None:
                continue
            whole = total.view(held.shape)
            if buffer.rule == "sum":
                held += whole.to(held.dtype)
            else:
                held.lerp_((whole / self._samples).to(held.dtype), buffer.momentum)

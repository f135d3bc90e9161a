"""Optimizers of PyTorch over main parameters, for scripts that bring their own."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.parallel.gradients import Gradients


class TorchOptimizer:
    """Shows an optimizer the gradients and lets it step."""

    def __init__(self, optimizer: torch.optim.Optimizer, gradients: Gradients) -> None:
        self.optimizer = optimizer
        self._gradients = gradients

    def update(self, factor: Tensor) -> None:
        """One step with gradients times ``factor``; none where it is 0. Waits for the device: what
        an optimizer that is not ours does without gradients is not known."""
        value = float(factor)
        if value == 0.0:
            return
        if value != 1.0:
            self._gradients.scale(factor)
        for main in self._gradients.mains:
            main.value.grad = main.grad
        self.optimizer.step()


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use ``lr`` for the next update of every parameter."""
    for group in optimizer.param_groups:
        group["lr"] = lr

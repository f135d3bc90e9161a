"""Optimizers of PyTorch over main parameters, for scripts that bring their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.config.errors import ConfigError
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
            main.value.grad = None if main.grad is None else _laid_out_as(main.value, main.grad)
        self.optimizer.step()


def _laid_out_as(value: Tensor, grad: Tensor) -> Tensor:
    """PyTorch's fused kernels on processors take both to have the same strides, and buckets lay
    gradients out row by row."""
    if grad.stride() == value.stride():
        return grad
    return torch.empty_like(value, dtype=grad.dtype).copy_(grad)


def load_state(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Go on from the ``state_dict`` of an optimizer of the same kind.

    Raises:
        ConfigError: it is of another one. Nothing was changed then.
    """
    before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    before["defaults"] = dict(optimizer.defaults)  # PyTorch adds its own as it loads
    try:
        optimizer.load_state_dict(state)
        groups = optimizer.param_groups
        lacking = [key for key in before["defaults"] for group in groups if key not in group]
        problem = f"It lacks {lacking[0]}." if lacking else ""
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        vars(optimizer).update(before)
        expected = f"what the state_dict of {type(optimizer).__name__} was"
        raise ConfigError("state.optimizer", "another one's", expected, problem)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use ``lr`` for the next update of every parameter."""
    for group in optimizer.param_groups:
        group["lr"] = lr

"""AdamW over main parameters: decay only where it belongs, fused where the device has it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.config.sections import OptimConfig
from weft.parallel.mains import MainParam

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Optimizer state that a checkpoint holds beside each parameter, of the parameter's shape."""


def build_adamw(mains: Sequence[MainParam], optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101). Norms, biases, embeddings do not decay."""
    decay = [m.value for m in mains if m.spec.decay]
    plain = [m.value for m in mains if not m.spec.decay]
    groups = [
        {"params": params, "weight_decay": weight_decay}
        for params, weight_decay in ((decay, optim.weight_decay), (plain, 0.0))
        if params
    ] or [{"params": [torch.zeros(0)]}]  # a stage without layers; PyTorch wants something
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use ``lr`` for the next update of every parameter."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def num_updates(optimizer: torch.optim.Optimizer) -> int:
    """Updates done so far: the steps whose batch had any weight. 0 before the first."""
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)


def set_state(
    optimizer: torch.optim.Optimizer, value: Tensor, moments: dict[str, Tensor], num_updates: int
) -> None:
    """Put one parameter's optimizer state back as it was after ``num_updates`` updates."""
    step = torch.tensor(float(num_updates), dtype=torch.float32, device=value.device)
    optimizer.state[value] = {"step": step, **moments}

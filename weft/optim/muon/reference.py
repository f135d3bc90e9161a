"""Muon a second time, by decomposition into singular values: for ``weft verify``."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from weft.optim.muon.config import MuonConfig


class ByDecomposition(Optimizer):
    """Matrices whose names begin as layers do; PyTorch's AdamW has the other parameters."""

    def __init__(self, config: MuonConfig, groups: list[dict[str, Any]]) -> None:
        self._config = config
        super().__init__(groups, {"lr": config.lr, "weight_decay": config.weight_decay})
        self._matrices = [each for each in self.param_groups if _is_matrix(each)]
        others = [each for each in self.param_groups if not _is_matrix(each)]
        self._others = AdamW(others, betas=config.betas, eps=config.eps, fused=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update. ``closure``: none."""
        assert closure is None, "gradients are there"
        self._others.step()
        for group in self._matrices:
            (param,) = group["params"]
            mean = self.state[param].setdefault("mean", torch.zeros_like(param))
            beta = self._config.momentum
            mean.copy_(beta * mean + (1 - beta) * param.grad)
            ahead = beta * mean + (1 - beta) * param.grad if self._config.nesterov else mean
            step = _near_one(ahead, self._config.newton_schulz_steps)
            rows, columns = param.shape
            longer = {
                "original": sqrt(rows / columns) if rows > columns else 1.0,
                "match_rms_adamw": sqrt(max(rows, columns)) / 5,
            }
            kept = 1 - group["lr"] * group["weight_decay"]
            param.copy_(kept * param - group["lr"] * longer[self._config.adjust_lr] * step)


def _is_matrix(group: dict[str, Any]) -> bool:
    return bool(group["name"].startswith("layers.") and group["params"][0].ndim == 2)


def _near_one(matrix: Tensor, steps: int) -> Tensor:
    """With the polynomial taken of its singular values, after they were scaled."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    result: Tensor = left * values @ right
    return result

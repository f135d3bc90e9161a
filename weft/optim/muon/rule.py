"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), scaled as in arXiv
2502.16982: each step of a layer's matrix is about an orthogonal one. Everything else is AdamW's.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor

from weft.optim.adamw.rule import MOMENTS, adamw
from weft.optim.muon.config import MuonConfig
from weft.optim.rule import Dims, Group, Rule, Update, every_dim, take_over
from weft.parallel.mains import MainParam
from weft.plan.model import ParamSpec

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5: a polynomial that takes singular values from 0 .. 1 near 1, steep at 0."""
LEAST_NORM = 1e-7
RMS_OF_ADAMW = 0.2


def is_matrix(spec: ParamSpec) -> bool:
    """A matrix of a layer; tables and the head are looked up in, or look up, by row."""
    return len(spec.shape) == 2 and isinstance(spec.unit, int)


class Muon(Rule):
    """Matrices are made orthogonal as wholes, in the dtype that the model computes in."""

    skips_on_device = True
    takes_wholes = True

    def __init__(self, config: MuonConfig) -> None:
        self._config = config

    def state(self, spec: ParamSpec) -> Mapping[str, Dims]:
        names = ("momentum",) if is_matrix(spec) else MOMENTS
        return dict.fromkeys(names, every_dim(spec))

    def takes_whole(self, spec: ParamSpec) -> bool:
        return is_matrix(spec)

    def update(self, update: Update) -> None:
        config = self._config
        directions: dict[MainParam, Tensor] = {}
        of: dict[MainParam, Group] = {}
        for group in update.groups:
            if "momentum" not in group.states:
                adamw(update, group, betas=config.betas, eps=config.eps)
                continue
            kept, grads = list(group.states["momentum"]), group.grads
            means = torch._foreach_lerp(kept, grads, 1 - config.momentum)
            ahead = torch._foreach_lerp(grads, means, config.momentum)
            take_over(kept, means, update.skip)
            directions |= zip(group.mains, ahead if config.nesterov else means, strict=True)
            of |= dict.fromkeys(group.mains, group)
        found = update.wholes.by_whole(
            [*directions], [*directions.values()], is_matrix, self._orthogonal
        )
        for main, step in found.items():
            lr = update.lr * of[main].lr_scale
            new = main.value * (1 - lr * of[main].weight_decay) - lr * self._scale(main) * step
            take_over([main.value], [new], update.skip)

    def _orthogonal(self, matrix: Tensor, dtype: torch.dtype) -> Tensor:
        return orthogonal(matrix.to(dtype), self._config.newton_schulz_steps).to(matrix.dtype)

    def _scale(self, main: MainParam) -> float:
        height, width = main.spec.shape
        if self._config.adjust_lr == "original":
            return sqrt(max(1.0, height / width))
        return RMS_OF_ADAMW * sqrt(max(height, width))


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """``[height, width]``, with its singular vectors, and singular values of about 1.

    By a polynomial of it (Newton and Schulz), after its norm was brought to 1.
    """
    first, third, fifth = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=LEAST_NORM)
    for _ in range(steps):
        square = x @ x.T
        higher = torch.addmm(square, square, square, beta=third, alpha=fifth)
        x = torch.addmm(x, higher, x, beta=first)
    return (x.T if is_tall else x).contiguous()

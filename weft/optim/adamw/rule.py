"""AdamW (Loshchilov and Hutter, arXiv 1711.05101), fused where the device has it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.config.optim_sections import AdamWConfig
from weft.optim.rule import Dims, Group, Rule, Update, every_dim
from weft.plan.model import ParamSpec


class AdamW(Rule):
    """Decay is apart from the gradient; running means are corrected for their start at zero."""

    skips_on_device = True

    def __init__(self, config: AdamWConfig) -> None:
        self._betas = config.betas
        self._eps = config.eps

    def state(self, spec: ParamSpec) -> Mapping[str, Dims]:
        return dict.fromkeys(MOMENTS, every_dim(spec))

    def update(self, update: Update) -> None:
        for group in update.groups:
            adamw(update, group, betas=self._betas, eps=self._eps)


MOMENTS = ("exp_avg", "exp_avg_sq")
"""What is kept of every element."""


def adamw(update: Update, group: Group, *, betas: tuple[float, float], eps: float) -> None:
    """One update of a group that keeps ``MOMENTS``."""
    beta1, beta2 = betas
    torch._fused_adamw_(
        group.values,
        group.grads,
        list(group.states[MOMENTS[0]]),
        list(group.states[MOMENTS[1]]),
        [],
        [update.count] * len(group.mains),
        lr=update.lr * group.lr_scale,
        beta1=beta1,
        beta2=beta2,
        weight_decay=group.weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        found_inf=update.skip,
    )

"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.config.optim_sections import SgdConfig
from weft.optim.rule import Dims, Rule, Update, every_dim, take_over
from weft.plan.model import ParamSpec


class Sgd(Rule):
    """``v = momentum v + g + weight_decay p``, then ``p = p - lr v``, as PyTorch defines it."""

    skips_on_device = True

    def __init__(self, config: SgdConfig) -> None:
        self._momentum = config.momentum

    def state(self, spec: ParamSpec) -> Mapping[str, Dims]:
        return {"momentum": every_dim(spec)} if self._momentum else {}

    def update(self, update: Update) -> None:
        for group in update.groups:
            steps = group.grads
            torch._foreach_add_(steps, group.values, alpha=group.weight_decay)
            if self._momentum:
                kept = list(group.states["momentum"])
                velocities = torch._foreach_mul(kept, self._momentum)
                torch._foreach_add_(velocities, steps)
                take_over(kept, velocities, update.skip)
                steps = list(velocities)
            rate = update.lr * group.lr_scale
            take_over(
                group.values, torch._foreach_add(group.values, steps, alpha=-rate), update.skip
            )

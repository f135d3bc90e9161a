"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.config.sections import SgdConfig
from weft.optim.rule import Dims, Kind, Rule, Update, every_dim
from weft.plan.model import ParamSpec


class Sgd(Rule):
    """``v = momentum v + g + weight_decay p``, then ``p = p - lr v``, as PyTorch defines it."""

    def __init__(self, config: SgdConfig) -> None:
        self._momentum = config.momentum

    def state(self, spec: ParamSpec) -> Mapping[str, Dims]:
        return {"momentum": every_dim(spec)} if self._momentum else {}

    def update(self, update: Update) -> None:
        for group in update.groups:
            steps = group.grads
            torch._foreach_add_(steps, group.values, alpha=group.weight_decay)
            if self._momentum:
                velocities = list(group.states["momentum"])
                torch._foreach_mul_(velocities, self._momentum)
                torch._foreach_add_(velocities, steps)
                steps = velocities
            torch._foreach_add_(group.values, steps, alpha=-update.lr * group.lr_scale)


OPTIMIZER = Kind(name="sgd", order=1, rule=Sgd)

"""Optimizers as somebody may add them: one element-wise, one that needs whole-tensor norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from weft.config.optim_sections import OptimConfig
from weft.optim.kind import Kind
from weft.optim.registry import OPTIMIZERS
from weft.optim.rule import Dims, Rule, Update, every_dim
from weft.plan.model import ParamSpec


class SignConfig(OptimConfig):
    """Sign descent with momentum."""

    kind: Literal["sign"] = "sign"
    momentum: float = 0.8


class Sign(Rule):
    def __init__(self, config: SignConfig) -> None:
        self._momentum = config.momentum

    def state(self, spec: ParamSpec) -> Mapping[str, Dims]:
        return {"direction": every_dim(spec)}

    def update(self, update: Update) -> None:
        for group in update.groups:
            for main, direction in zip(group.mains, group.states["direction"], strict=True):
                assert main.grad is not None
                direction.mul_(self._momentum).add_(main.grad)
                main.value.mul_(1 - update.lr * group.weight_decay)
                main.value.sub_(update.lr * group.lr_scale * direction.sign())


class TrustConfig(OptimConfig):
    """Steps as long as a tensor is large."""

    kind: Literal["trust"] = "trust"
    momentum: float = 0.8


def trust_ratio(param: Tensor, grad: Tensor, step: Tensor) -> Tensor:
    """Of squared norms."""
    return (param.sqrt() + 1e-3) / (step.sqrt() + grad.sqrt() + 1e-3)


class Trust(Rule):
    """Norms of all three kinds, and a running mean of one number for each logical tensor."""

    def __init__(self, config: TrustConfig) -> None:
        self._momentum = config.momentum

    def state(self, spec: ParamSpec) -> Mapping[str, Dims]:
        return {"direction": every_dim(spec), "trust": ()}

    def update(self, update: Update) -> None:
        for group in update.groups:
            torch._foreach_mul_(list(group.states["direction"]), self._momentum)
            torch._foreach_add_(list(group.states["direction"]), group.grads)
        found = update.squared_norms(
            [group.values for group in update.groups],
            [group.grads for group in update.groups],
            [group.states["direction"] for group in update.groups],
        )
        for group, *norms in zip(update.groups, *found, strict=True):
            states = (group.states["trust"], group.states["direction"])
            for value, trust, step, *squares in zip(group.values, *states, *norms, strict=True):
                trust.lerp_(trust_ratio(*squares).to(trust.dtype), 0.5)
                value.sub_(update.lr * group.lr_scale * trust * step)


OPTIMIZERS.add(Kind(name="sign", order=10, rule=Sign))
OPTIMIZERS.add(Kind(name="trust", order=11, rule=Trust))

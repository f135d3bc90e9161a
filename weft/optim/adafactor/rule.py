"""Adafactor (Shazeer and Stern, arXiv 1804.04235), as PyTorch defines it: decay apart, a learning
rate from the schedule that is relative to the size of each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from weft.optim.adafactor.config import AdafactorConfig
from weft.optim.rule import Dims, Group, Rule, Update, every_dim, take_over
from weft.parallel.mains import MainParam
from weft.plan.model import ParamSpec

FACTORS = ("row_var", "col_var", "mean_var")
"""Running means of squared gradients over each row, over each column and over a whole matrix."""


def kept_dims(spec: ParamSpec) -> tuple[Dims, ...]:
    """Of a matrix, or of each in a stack of them: its rows, its columns, itself; of a vector
    nothing is summed."""
    every = every_dim(spec)
    return () if len(every) < 2 else (every[:-1], (*every[:-2], every[-1]), every[:-2])


class Adafactor(Rule):
    """The second moment of a matrix is the outer product of its rows' and its columns' means.

    The mean over all rows is kept too, though it follows from them: a rank need not have them all.
    """

    skips_on_device = True

    def __init__(self, config: AdafactorConfig) -> None:
        self._config = config

    def state(self, spec: ParamSpec) -> Mapping[str, Dims]:
        dims = kept_dims(spec)
        return dict(zip(FACTORS, dims, strict=True)) if dims else {"variance": every_dim(spec)}

    def update(self, update: Update) -> None:
        groups = update.groups
        squares = update.squares_along([group.grads for group in groups], kept_dims)
        (sizes,) = update.squared_norms([group.values for group in groups])
        steps = [
            [self._step(update, group, number, sums) for number, sums in enumerate(of_group)]
            for group, of_group in zip(groups, squares, strict=True)
        ]
        (lengths,) = update.squared_norms(steps)
        for group, *of_group in zip(groups, steps, sizes, lengths, strict=True):
            lr = update.lr * group.lr_scale
            rate = torch.clamp(update.count.double().rsqrt(), max=lr)
            for main, step, size, length in zip(group.mains, *of_group, strict=True):
                scale = _root_mean(size, main).clamp(min=self._config.min_rms) * rate
                too_long = _root_mean(length, main) / self._config.clip_threshold
                factor = (scale / too_long.clamp(min=1.0)).to(step.dtype)
                new = main.value * (1 - lr * group.weight_decay) - factor * step
                take_over([main.value], [new], update.skip)

    def _step(self, update: Update, group: Group, number: int, sums: list[Tensor]) -> Tensor:
        """The gradient over the root of its second moment, whose states take this one in."""
        main = group.mains[number]
        grad, eps = group.grads[number], self._config.eps or torch.finfo(main.value.dtype).eps
        newest = update.count.double() ** self._config.beta2_decay

        def taken_in(name: str, square: Tensor) -> Tensor:
            kept = group.states[name][number]
            new = kept.lerp(square.to(kept.dtype), newest.to(kept.dtype))
            take_over([kept], [new], update.skip)
            return new

        if not sums:
            moment = taken_in("variance", grad.square())
        else:
            height, width = main.spec.shape[-2:]
            counts = (width, height, height * width)
            rows, columns, mean = (
                taken_in(name, total / count)
                for name, total, count in zip(FACTORS, sums, counts, strict=True)
            )
            moment = rows[..., :, None] * columns[..., None, :]
            moment /= mean[..., None, None].clamp(min=eps)
        return moment.clamp_(min=eps * eps).rsqrt_().mul_(grad)


def _root_mean(square: Tensor, main: MainParam) -> Tensor:
    """From the sum of squares over a whole tensor, fp64."""
    return (square / prod(main.spec.shape)).sqrt()

"""What a configuration may say of Adafactor. No torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from weft.config.optim_sections import OptimConfig
from weft.config.values import Positive


class AdafactorConfig(OptimConfig):
    """Adafactor, its learning rate over time, and gradient clipping. Of a matrix it keeps a number
    for each row and each column: hardly any memory beside the weights."""

    kind: Literal["adafactor"] = "adafactor"
    """Which optimizer this is."""
    lr: Positive = 1e-2
    """Highest learning rate, relative to the size of each tensor; never above 1 / sqrt(update)."""
    beta2_decay: Annotated[float, Field(strict=True, lt=0)] = -0.8
    """Power of the number of the update by which its squared gradient counts in running means."""
    eps: Positive | None = None
    """Least root mean square that a gradient is divided by; null is the rounding error of the
    weights' dtype."""
    min_rms: Positive = 1e-3
    """Least size of a tensor (root mean square) that its learning rate is relative to."""
    clip_threshold: Annotated[float, Field(strict=True, ge=1)] = 1.0
    """Updates of a tensor with a larger root mean square are scaled down to it."""

    def rehearsed(self, eps: float, /) -> Self:
        return self.model_copy(update={"eps": eps})

"""All that Weft knows of this optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.optim.adafactor.config import AdafactorConfig
from weft.optim.kind import Kind

if TYPE_CHECKING:
    from torch.optim import Optimizer


def moved_bytes(_: AdafactorConfig) -> float:
    """Of a matrix: the second moment is made and used in six passes, the new value in four, and
    three norms are taken; its states are little."""
    return 104


def reference(config: AdafactorConfig, groups: list[dict[str, Any]]) -> Optimizer:
    """PyTorch's own, parameter by parameter."""
    from torch.optim import Adafactor

    return Adafactor(
        groups,
        beta2_decay=config.beta2_decay,
        eps=(config.eps, config.min_rms),
        d=config.clip_threshold,
        foreach=False,
    )


RULE = "weft.optim.adafactor.rule:Adafactor"

OPTIMIZER = Kind(
    name="adafactor",
    order=2,
    config=AdafactorConfig,
    rule=RULE,
    moved_bytes=moved_bytes,
    reference=reference,
)

"""All that Weft knows of this optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.config.optim_sections import AdamWConfig
from weft.optim.kind import Kind

if TYPE_CHECKING:
    from torch.optim import Optimizer


def moments(_: AdamWConfig) -> float:
    """Both running means."""
    return 2


def reference(config: AdamWConfig, groups: list[dict[str, Any]]) -> Optimizer:
    """PyTorch's own, parameter by parameter."""
    from torch.optim import AdamW

    return AdamW(groups, betas=config.betas, eps=config.eps, fused=False)


RULE = "weft.optim.adamw.rule:AdamW"

OPTIMIZER = Kind(
    name="adamw",
    order=0,
    config=AdamWConfig,
    rule=RULE,
    moments=moments,
    by_element=True,
    reference=reference,
)

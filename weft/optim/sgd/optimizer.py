"""All that Weft knows of this optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.config.optim_sections import SgdConfig
from weft.optim.kind import Kind

if TYPE_CHECKING:
    from torch.optim import Optimizer


def moments(config: SgdConfig) -> float:
    """None without momentum."""
    return 1 if config.momentum else 0


def moved_bytes(config: SgdConfig) -> float:
    """Decay and the step are sums of their own, and what is taken over is written a second time;
    so are velocities."""
    return 40 + 32 * bool(config.momentum)


def reference(config: SgdConfig, groups: list[dict[str, Any]]) -> Optimizer:
    """PyTorch's own, parameter by parameter."""
    from torch.optim import SGD

    return SGD(groups, momentum=config.momentum, fused=False)


RULE = "weft.optim.sgd.rule:Sgd"

OPTIMIZER = Kind(
    name="sgd",
    order=1,
    config=SgdConfig,
    rule=RULE,
    moments=moments,
    moved_bytes=moved_bytes,
    by_element=True,
    reference=reference,
)

"""All that Weft knows of this optimizer."""

from __future__ import annotations

from weft.config.sections import SgdConfig
from weft.optim.kind import Kind


def moments(config: SgdConfig) -> float:
    """None without momentum."""
    return 1 if config.momentum else 0


RULE = "weft.optim.sgd.rule:Sgd"

OPTIMIZER = Kind(name="sgd", order=1, config=SgdConfig, rule=RULE, moments=moments)

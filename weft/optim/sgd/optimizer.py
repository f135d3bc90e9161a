"""All that Weft knows of this optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.config.sections import SgdConfig
from weft.optim.kind import Kind

if TYPE_CHECKING:
    from weft.optim.rule import Rule


def rule(config: SgdConfig) -> Rule:
    """The optimizer of a configuration."""
    from weft.optim.sgd.rule import Sgd

    return Sgd(config)


def moments(config: SgdConfig) -> float:
    """None without momentum."""
    return 1 if config.momentum else 0


OPTIMIZER = Kind(name="sgd", order=1, config=SgdConfig, rule=rule, moments=moments)

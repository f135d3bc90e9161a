"""All that Weft knows of this optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.config.sections import AdamWConfig
from weft.optim.kind import Kind

if TYPE_CHECKING:
    from weft.optim.rule import Rule


def rule(config: AdamWConfig) -> Rule:
    """The optimizer of a configuration."""
    from weft.optim.adamw.rule import AdamW

    return AdamW(config)


def moments(_: AdamWConfig) -> float:
    """Both running means."""
    return 2


OPTIMIZER = Kind(name="adamw", order=0, config=AdamWConfig, rule=rule, moments=moments)

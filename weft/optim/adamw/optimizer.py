"""All that Weft knows of this optimizer."""

from __future__ import annotations

from weft.config.sections import AdamWConfig
from weft.optim.kind import Kind


def moments(_: AdamWConfig) -> float:
    """Both running means."""
    return 2


RULE = "weft.optim.adamw.rule:AdamW"

OPTIMIZER = Kind(name="adamw", order=0, config=AdamWConfig, rule=RULE, moments=moments)

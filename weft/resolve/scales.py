"""What delayed scales are made of: of a configuration, in a plan."""

from __future__ import annotations

from dataclasses import replace

from weft.config.errors import ConfigError
from weft.config.sections import Config
from weft.plan.plan import Plan
from weft.precision.registry import scales_delayed


def with_scales(plan: Plan, config: Config) -> Plan:
    """The plan with what its delayed scales are made of.

    Raises:
        ConfigError: it has none, or its file says them.
    """
    asked = config.compute.delayed
    if asked is None:
        return plan
    if not any(scales_delayed(stage.precision) for _, _, stage in plan.stages()):
        hint = "precision: fp8-delayed has scales of earlier steps."
        raise ConfigError("compute.delayed", asked.model_dump(), "null with this precision", hint)
    if config.plan.file is not None:
        hint = "The file says it: history and margin."
        raise ConfigError("compute.delayed", asked.model_dump(), "null with plan.file", hint)
    return replace(plan, history=asked.history, margin=asked.margin)

"""What scales of products that are delayed are made of, as a plan says it."""

from __future__ import annotations

from weft.config.delayed_scales import MOST_HISTORY, MOST_MARGIN
from weft.config.errors import ConfigError
from weft.plan.plan import HISTORY, Plan
from weft.precision.registry import scales_delayed


def check_scales(plan: Plan) -> None:
    """Refuse what a configuration may not say of them, and all where no scales are delayed.

    Raises:
        ConfigError: a plan does.
    """
    delayed = any(scales_delayed(stage.precision) for _, _, stage in plan.stages())
    for key, usual, limits in (
        ("history", HISTORY, (1, MOST_HISTORY)),
        ("margin", 0, (0, MOST_MARGIN)),
    ):
        value = getattr(plan, key)
        least, most = limits if delayed else (usual, usual)
        if type(value) is not int or not least <= value <= most:
            expected = f"an integer from {least} to {most}" if delayed else f"{usual}"
            hint = "" if delayed else "Only precision fp8-delayed has scales of earlier steps."
            raise ConfigError(key, value, expected, hint)

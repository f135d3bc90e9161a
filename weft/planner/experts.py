"""What the exchange of tokens among ranks with other experts asks of the rest of a stage."""

from __future__ import annotations

from weft.axes.registry import AXES
from weft.config.errors import ConfigError
from weft.plan.plan import StagePlan
from weft.planner.casts import saves_bytes
from weft.precision.casts import CASTS

BY_EXPERTS = next(name for name, axis in AXES.items() if axis.near_key == "expert_ways")
"""The axis whose ranks divide experts."""
PIECES = 1, 2, 4
"""In so many of which tokens may go to experts, as the planner has it."""


def check_experts(where: str, stage: StagePlan) -> None:
    """Tokens travel where they are asked to do so in some way.

    Raises:
        ConfigError: they do not.
    """
    pieces = stage.expert_pieces
    if pieces < 1:
        raise ConfigError(f"{where}.expert_pieces", pieces, "at least 1")
    _check_cast(where, stage)
    if pieces > 1 and stage.mesh.size(BY_EXPERTS) == 1:
        hint = "They are of tokens on their way to experts of other ranks."
        raise ConfigError(f"{where}.expert_pieces", pieces, f"1 where {BY_EXPERTS} is 1", hint)


def _check_cast(where: str, stage: StagePlan) -> None:
    cast, between = stage.expert_cast, stage.expert_cast_between
    key = f"{where}.expert_cast"
    if cast not in ("", *CASTS):
        raise ConfigError(key, cast, f"one of {', '.join(map(repr, CASTS))}, or none")
    if between not in ("", "nodes"):
        raise ConfigError(f"{key}_between", between, "'nodes', or none")
    if between and not cast:
        raise ConfigError(f"{key}_between", between, "none without expert_cast")
    if cast and stage.mesh.size(BY_EXPERTS) == 1:
        raise ConfigError(key, cast, f"none where {BY_EXPERTS} is 1", "No token leaves its rank.")
    if cast and not saves_bytes(cast, stage.precision):
        raise ConfigError(key, cast, f"what has fewer bytes than {stage.precision}, or none")

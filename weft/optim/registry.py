"""The optimizers by name, as ``optim.kind`` gives it. No torch until one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.config.names import Registry
from weft.config.sections import OptimConfig
from weft.optim.kind import Kind

if TYPE_CHECKING:
    from weft.optim.rule import Rule

OPTIMIZERS: Registry[Kind] = Registry(
    "weft.optim", folder="optimizer", entry="OPTIMIZER", group="weft.optimizers"
)
"""Every folder beside this file, and what installed packages name so."""


def rule_of(optim: OptimConfig) -> Rule:
    """The optimizer that a configuration asks for."""
    return OPTIMIZERS.named("optim.kind", optim.kind).rule(optim)

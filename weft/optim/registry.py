"""The optimizers by name, as ``optim.kind`` gives it."""

from __future__ import annotations

from weft.config.names import Registry
from weft.config.sections import OptimConfig
from weft.optim.rule import Kind, Rule

OPTIMIZERS: Registry[Kind] = Registry("weft.optim", entry="OPTIMIZER", group="weft.optimizers")
"""Every file beside this one that has an ``OPTIMIZER``, and what installed packages name so."""


def rule_of(optim: OptimConfig) -> Rule:
    """The optimizer that a configuration asks for."""
    return OPTIMIZERS.named("optim.kind", optim.kind).rule(optim)

"""The optimizers by name, as ``optim.kind`` gives it. No torch until one is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING

from weft.config.names import Registry
from weft.config.optim_sections import OptimConfig
from weft.cost.work import ADAMW_BYTES, Training
from weft.optim.groups import marked
from weft.optim.kind import Kind
from weft.plan.model import ParamSpec, UnitName

if TYPE_CHECKING:
    from weft.optim.rule import Rule

OPTIMIZERS: Registry[Kind] = Registry(
    Kind, "weft.optim", folder="optimizer", entry="OPTIMIZER", group="weft.optimizers"
)
"""Every folder beside this file, and what installed packages name so."""


def rule_of(optim: OptimConfig) -> Rule:
    """The optimizer that a configuration asks for."""
    rule = OPTIMIZERS.named("optim.kind", optim.kind).rule
    if isinstance(rule, str):
        module, _, name = rule.partition(":")
        rule = vars(import_module(module))[name]
    made: Rule = rule(optim)
    return made


def is_by_element(optim: OptimConfig) -> bool:
    """As ``Kind`` has it."""
    return OPTIMIZERS.named("optim.kind", optim.kind).by_element


def training_of(
    optim: OptimConfig, params: Sequence[ParamSpec], *, compiled: bool = True
) -> Training:
    """What of a model with these parameters is trained, and how much is kept of it; ``compiled``:
    as ``Training`` has it."""
    whole, trained = Counter[UnitName](), Counter[UnitName]()
    specs = marked(optim, params)
    for spec in specs:
        whole[spec.unit] += spec.numel
        trained[spec.unit] += spec.numel * spec.trainable
    layers = sorted(unit for unit in whole if isinstance(unit, int))
    units: list[UnitName] = ["embed", *layers, "head"]
    parts = tuple(trained[unit] / max(whole[unit], 1) for unit in units)
    kind = OPTIMIZERS.named("optim.kind", optim.kind)
    kept = _kept(rule_of(optim), specs) if kind.moments is None else kind.moments(optim)
    moved = ADAMW_BYTES if kind.moved_bytes is None else kind.moved_bytes(optim)
    every = Training(
        kept,
        by_element=kind.by_element,
        wide_products=_wide(specs),
        compiled=compiled,
        moved_bytes=moved,
    )
    if trained == whole:
        return every
    second = sum(spec.numel for spec in specs if spec.inside)
    first = 1 - second / max(sum(whole[unit] for unit in layers), 1)
    return replace(every, units=parts, first=first)


def _wide(specs: Sequence[ParamSpec]) -> float:
    """Of layers' matrices, the part whose products never have eight bits."""
    matrices = [spec for spec in specs if spec.is_matrix]
    wide = sum(spec.numel for spec in matrices if not spec.fp8)
    return wide / sum(spec.numel for spec in matrices) if wide else 0.0


def _kept(rule: Rule, specs: Sequence[ParamSpec]) -> float:
    """Numbers for each parameter that is trained, on average."""
    trained = [spec for spec in specs if spec.trainable]
    kept = sum(
        prod(spec.shape[dim] for dim in dims)
        for spec in trained
        for dims in rule.state(spec).values()
    )
    return kept / sum(spec.numel for spec in trained)

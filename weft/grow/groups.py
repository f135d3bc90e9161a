"""Groups of parameters by name, where layers have other numbers than before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from weft.config.optim_sections import ParamGroupConfig
from weft.grow.growth import Growth, old_names
from weft.models.registry import param_specs
from weft.optim.groups import first_of
from weft.plan.model import ParamSpec

Said = Mapping[str, Any]


def groups_of(said: Sequence[Said], growth: Growth) -> list[Said]:
    """``optim.groups`` of a grown model, of those of the old one: each parameter is in the group of
    what it copies. As they were, where the same patterns say that."""
    groups = [ParamGroupConfig.model_validate(each) for each in said]
    old = {param.name: param for param in param_specs(growth.old)}
    new = param_specs(growth.new)
    copied = [old.get(old_names(param, growth)[0], param) for param in new]
    wanted = [first_of(groups, param) for param in copied]
    if wanted == [first_of(groups, param) for param in new]:
        return [*said]
    found = list[Said]()
    for each, group in zip(said, groups, strict=True):
        mine = [param for param, own in zip(new, wanted, strict=True) if own is group]
        kept = {key: value for key, value in each.items() if key != "narrower_than"}
        found += ({**kept, "params": pattern} for pattern in _patterns(mine, new))
    return found


def _patterns(some: Sequence[ParamSpec], every: Sequence[ParamSpec]) -> Iterator[str]:
    """That match these of all: of whole layers one each."""
    for unit, params in groupby(some, key=lambda param: param.unit):
        names = [param.name for param in params]
        if isinstance(unit, int) and len(names) == sum(param.unit == unit for param in every):
            yield f"layers.{unit}.*"
        else:
            yield from names

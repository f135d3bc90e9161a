"""Which parameters are trained, and with which numbers: patterns on logical names, and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from weft.config.errors import ConfigError
from weft.config.optim_sections import OptimConfig, ParamGroupConfig
from weft.plan.model import ParamSpec


@dataclass(frozen=True, slots=True)
class Settings:
    """With what a parameter is updated."""

    lr_scale: float
    weight_decay: float


def group_of(optim: OptimConfig, spec: ParamSpec) -> ParamGroupConfig | None:
    """The first group that a parameter is in."""
    return first_of(optim.groups, spec)


def first_of(groups: Sequence[ParamGroupConfig], spec: ParamSpec) -> ParamGroupConfig | None:
    """The first that a parameter is in."""
    return next((group for group in groups if _is_in(spec, group)), None)


def _is_in(spec: ParamSpec, group: ParamGroupConfig) -> bool:
    if not fnmatchcase(spec.name, group.params):
        return False
    limit = group.narrower_than
    has_sides = len(spec.shape) == 2 + spec.of_experts
    return limit is None or (has_sides and min(spec.shape[-2:]) < limit)


def settings_of(optim: OptimConfig, spec: ParamSpec) -> Settings:
    """Decay as its group says, else of what decays at all."""
    group = group_of(optim, spec)
    decay = optim.weight_decay if spec.decay else 0.0
    if group is None:
        return Settings(1.0, decay)
    return Settings(group.lr_scale, decay if group.weight_decay is None else group.weight_decay)


def marked(optim: OptimConfig, specs: Sequence[ParamSpec]) -> list[ParamSpec]:
    """The parameters of a model, each with whether it is trained, and multiplies in eight bits.

    Raises:
        ConfigError: none is.
    """
    found = []
    for spec in specs:
        group = group_of(optim, spec)
        if group is None:
            found.append(spec)
        else:
            trainable = group.trainable and not spec.settled
            found.append(replace(spec, trainable=trainable, fp8=group.fp8))
    if found and not any(spec.trainable for spec in found):
        raise ConfigError("optim.groups", "all frozen", "at least one parameter that is trained")
    return found


def refuse_idle_groups(optim: OptimConfig, specs: Sequence[ParamSpec]) -> None:
    """Refuse a pattern that has no effect on a model.

    Raises:
        ConfigError: it matches no parameter, or none that an earlier group does not match; or all
            parameters are frozen.
    """
    marked(optim, specs)
    effective = [group_of(optim, spec) for spec in specs]
    for number, group in enumerate(optim.groups):
        key = f"optim.groups[{number}].params"
        mine = [spec for spec, each in zip(specs, effective, strict=True) if each is group]
        if mine:
            _refuse_idle_fp8(key, group, mine)
            continue
        if any(_is_in(spec, group) for spec in specs):
            hint = "The first group that matches counts: put this one before it."
            expected = "a parameter that no group before it matches"
            raise ConfigError(key, group.params, expected, hint)
        hint = f"Names are like {', '.join(spec.name for spec in specs[:3])}."
        limit = group.narrower_than
        whose = f"matrix's name, narrower than {limit}" if limit else "parameter's name"
        expected = f"a pattern that matches a {whose}"
        raise ConfigError(key, group.params, expected, hint)


def _refuse_idle_fp8(key: str, group: ParamGroupConfig, specs: Sequence[ParamSpec]) -> None:
    """``specs``: the parameters of a group."""
    says_more = group.lr_scale != 1.0 or group.weight_decay is not None or not group.trainable
    matrices = any(spec.is_matrix for spec in specs)
    if not group.fp8 and not says_more and not matrices:
        expected = "a pattern that matches a layer's matrix: others never multiply in fp8"
        raise ConfigError(key, group.params, expected)

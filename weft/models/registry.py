"""The model families by name. Imports torch only when a model is built or converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from weft.config.errors import ConfigError
from weft.config.names import Registry, unknown_name
from weft.config.open_fields import section_of
from weft.models.family import Family
from weft.models.shape import ModelShape
from weft.plan.layout import Dim, Layout, dims_of, of_rows
from weft.plan.model import ModelSpec, ParamSpec

if TYPE_CHECKING:
    from torch import nn

    from weft.config.sections import ModelConfig
    from weft.models.decoder import Decoder
    from weft.nn.stage import Stage

FAMILIES: Registry[Family[Any]] = Registry(
    Family, "weft.models", folder="family", entry="FAMILY", group="weft.families"
)
"""Every folder beside this file, and what installed packages name as ``weft.families``."""


def register_family(family: Family[Any]) -> None:
    """Add a family from outside to this process."""
    FAMILIES.add(family)


def build_model(
    spec: ModelSpec, layers: range | None = None, *, embed: bool = True, head: bool = True
) -> Decoder:
    """One stage of a decoder, or all of it, as ``build_stage``.

    Raises:
        ConfigError: the family's stages are none: they do not continue text.
    """
    from weft.models.decoder import Decoder

    stage = build_stage(spec, layers, embed=embed, head=head)
    if not isinstance(stage, Decoder):
        hint = "Its stages are no Decoder (weft.models.decoder), so they continue no text."
        raise ConfigError("model.family", spec.family, "a family of decoders", hint)
    return stage


def is_decoder(spec: ModelSpec) -> bool:
    """Its family's stages continue text."""
    from weft.models.decoder import Decoder
    from weft.nn.shapes import only_shapes

    with only_shapes():
        return isinstance(build_stage(spec), Decoder)


def build_stage(
    spec: ModelSpec,
    layers: range | None = None,
    *,
    embed: bool = True,
    head: bool = True,
    cut: tuple[bool, bool] = (False, False),
    first_row: int | None = None,
) -> Stage:
    """One stage of a model on the current default device; its values are not yet meaningful.

    ``cut``: it lacks the first part of the first of these layers; the second part of the last.
    ``first_row``: of the head it has the rows of the vocabulary from this one on.
    """
    more: dict[str, Any] = {"cut": cut} if any(cut) else {}
    if first_row is not None:
        more["first_row"] = first_row
    return FAMILIES[spec.family].model()(spec, layers, embed=embed, head=head, **more)


def param_specs(spec: ModelSpec) -> list[ParamSpec]:
    """Every parameter of the unsplit model, in the order of the forward pass."""
    return FAMILIES[spec.family].param_specs(spec)


def layout_of(spec: ModelSpec) -> dict[str, Layout]:
    """By module name, what the dimensions of a model's tensors are."""
    return FAMILIES[spec.family].layout(spec)


def dims_of_param(param: ParamSpec, layout: Mapping[str, Layout]) -> tuple[Dim, ...]:
    """What the dimensions of a parameter are, as its family's layout says."""
    module, _, leaf = param.name.rpartition(".")
    dims = layout[module].params[leaf]
    sizes = tuple(dim.size for dim in dims)
    assert sizes == param.shape, f"{param.name} {param.shape}: the layout says {sizes}"
    return dims


def head_rows_of(spec: ModelSpec) -> int:
    """Rows of the head, as far as several stages may divide them; 0 where it stays whole."""
    heads = [param for param in param_specs(spec) if "head" in param.units]
    if FAMILIES[spec.family].head_dim is None or any(len(param.units) > 1 for param in heads):
        return 0
    return spec.vocab_size


@lru_cache(maxsize=256)
def dims_of_model(spec: ModelSpec) -> frozenset[Dim]:
    """Every dimension that a model's layout names."""
    return frozenset(dims_of(layout_of(spec).values()))


def dims_of_stage(spec: ModelSpec, head_rows: tuple[int, int] | None) -> list[Dim]:
    """Likewise where a stage has these rows of the head."""
    head_dim = FAMILIES[spec.family].head_dim
    return [of_rows(dim, head_dim, head_rows) for dim in dims_of_model(spec)]


def modules_of(spec: ModelSpec) -> dict[str, nn.Module]:
    """Every module of the whole model by name, without memory for its parameters."""
    from weft.nn.shapes import only_shapes

    with only_shapes():
        return dict(build_stage(spec).module.named_modules())


@lru_cache(maxsize=256)
def shape_of(spec: ModelSpec) -> ModelShape:
    """What a model computes, for the cost model."""
    return FAMILIES[spec.family].shape(spec)


def model_config(data: Mapping[str, Any]) -> ModelConfig:
    """The section ``model`` of a configuration, as its family has it."""
    config: ModelConfig = section_of("families", "family", data)
    return config


def model_spec(config: ModelConfig, vocab_size: int, seq_len: int) -> ModelSpec:
    """The row the user named, with overrides, the tokenizer's vocabulary and the data's length.

    Raises ConfigError for an unknown family or size and for a shape that cannot be built.
    """
    family = FAMILIES.named("model.family", config.family)
    said = config.model_dump(exclude_none=True, exclude={"size"})
    if said.get("vocab_size", vocab_size) < vocab_size:
        expected = f"at least {vocab_size}, the tokens of the tokenizer"
        raise ConfigError("model.vocab_size", config.vocab_size, expected)
    sizes = _row(family, config, said)
    sizes |= {"vocab_size": vocab_size, "seq_len": seq_len, **said}
    spec: ModelSpec = family.spec.from_dict(sizes)
    check_spec(spec)
    return spec


def _row(family: Family[Any], config: ModelConfig, said: Mapping[str, Any]) -> dict[str, Any]:
    """What the row of a size says; without one, nothing, and all is given."""
    if config.size is not None:
        row = family.sizes.get(config.size)
        if row is None:
            raise unknown_name("model.size", config.size, family.sizes)
        return asdict(row)
    known = {*said, "vocab_size", "seq_len"}
    needed = [
        f"model.{field.name}"
        for field in fields(family.spec)
        if field.default is MISSING and field.default_factory is MISSING
    ]
    lacking = [key for key in needed if key.removeprefix("model.") not in known]
    if lacking:
        also = f", and {', '.join(lacking[1:])} too" if lacking[1:] else ""
        hint = f"Give it{also}, or a row of the family's table."
        raise ConfigError(lacking[0], None, "a value, as model.size is null", hint)
    return {}


def check_spec(spec: ModelSpec) -> None:
    """Refuse, as ConfigError, a shape that cannot be built."""
    FAMILIES[spec.family].check(spec)


def spec_from_dict(data: Mapping[str, Any]) -> ModelSpec:
    """What ``dataclasses.asdict`` gave for a spec of any family.

    Raises:
        ConfigError: no such family.
        KeyError, TypeError: fields that do not fit.
    """
    spec: ModelSpec = FAMILIES.named("model.family", data["family"]).spec.from_dict(data)
    return spec


def default_family() -> Family[Any]:
    """What a configuration that names no family asks for."""
    return next(iter(FAMILIES.values()))

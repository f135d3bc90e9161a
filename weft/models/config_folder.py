"""The model that a Hugging Face folder describes, from its ``config.json`` alone. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from weft.config.errors import ConfigError, show
from weft.models.config_json import Converter, Fields
from weft.models.registry import FAMILIES, check_spec, model_config, model_spec
from weft.plan.model import ModelSpec

CONFIG_JSON = "config.json"


def converters() -> dict[str, Converter[Any]]:
    """Of the families that Hugging Face has, by name."""
    found = {name: family.converter for name, family in FAMILIES.items()}
    return {name: converter for name, converter in found.items() if converter is not None}


def read_spec(folder: Path) -> tuple[ModelSpec, Converter[Any]]:
    """The shape, and how its family is written there.

    Raises ConfigError: there is no ``config.json``, or one that says what Weft does not implement,
    by key and value.
    """
    path = folder / CONFIG_JSON
    if not path.is_file():
        expected = f"a Hugging Face folder with a {CONFIG_JSON}"
        raise ConfigError("folder", str(folder), expected)
    fields = Fields(read_json(path))
    named = fields.take("architectures", [None])
    for converter in converters().values():
        if isinstance(named, list) and named and named[0] in converter.architectures:
            fields.take("model_type")
            spec: ModelSpec = converter.from_fields(named[0], fields)
            fields.finish()
            check_spec(spec)
            return spec, converter
    known = [name for converter in converters().values() for name in converter.architectures]
    raise fields.refusal("architectures", named, f"one of {', '.join(known)}")


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError: the file is not a JSON object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("file", str(path), "JSON", f"{error}.") from None
    if not isinstance(data, dict):
        raise ConfigError("file", str(path), "a JSON object")
    return data


def section_of(spec: ModelSpec) -> dict[str, Any]:
    """What the section ``model`` of a configuration says of a shape: all of it, without a row.

    Raises ConfigError: the family's section has no key for something that makes a difference.
    """
    sizes = asdict(spec)
    section = {**_known(sizes, FAMILIES[spec.family].config), "size": None}
    try:
        config = model_config(section)
    except ValidationError as error:
        first = error.errors()[0]
        expected = first["msg"].removeprefix("Input should be ")
        raise ConfigError(f"model.{first['loc'][-1]}", first["input"], expected) from error
    again = asdict(model_spec(config, spec.vocab_size, spec.seq_len))
    for name, value in sizes.items():
        if again[name] != value:
            expected = f"{show(again[name])}, as no configuration says anything else"
            raise ConfigError(f"model.{name}", value, expected)
    return section


def _known(values: dict[str, Any], section: type[BaseModel]) -> dict[str, Any]:
    """Those for which a section has keys, and so in the sections inside it."""
    found = {}
    for name in values.keys() & section.model_fields.keys():
        value, said = values[name], section.model_fields[name].annotation
        inside = [kind for kind in get_args(said) or (said,) if _is_section(kind)]
        found[name] = _known(value, *inside) if isinstance(value, dict) and inside else value
    return found


def _is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)

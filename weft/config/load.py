"""A recipe's name or a YAML file, and overrides -> a checked `Config` that knows its origins."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from weft.config.check import by_place, check, flat
from weft.config.errors import ConfigError, ConfigErrors
from weft.config.layers import (
    in_full,
    merge,
    read_layers,
    read_overrides,
    recipe_names,
    recipe_summaries,
)
from weft.config.schema import root
from weft.config.sections import Config
from weft.config.tree import DEFAULT, Entry, Origin, origin_of
from weft.config.yaml_text import dump

__all__ = [
    "Loaded",
    "config_schema",
    "explain",
    "load_config",
    "recipe_names",
    "recipe_summaries",
    "to_yaml",
]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and where each of its values came from."""

    config: Config
    origins: Mapping[str, Origin]
    """Dotted key of every value -> who gave it."""
    tree: Entry = field(repr=False)
    """What was written, defaults apart."""

    def place(self, *errors: ConfigError) -> ConfigErrors:
        """Problems found later, by whoever could judge a value, with the place of that value."""
        for error in errors:
            error.where = error.where or str(origin_of(self.tree, error.key))
        return ConfigErrors(errors)


def load_config(target: str, overrides: Sequence[str] = ()) -> Loaded:
    """Read a recipe or a file, what it extends, and ``key=value`` overrides, in rising order.

    Raises ConfigErrors with every problem of all of them at once.
    """
    unread: list[ConfigError] = []
    layers = [_named_after(target), *read_layers(target, unread)]
    unusable: list[ConfigError] = []
    layers += read_overrides(overrides, root(), unusable)
    whole = (in_full(layer, root()) for layer in layers)
    tree = reduce(lambda base, over: merge(base, over, root()), whole)
    outcome = check(tree, has_gaps=bool(unread))
    if isinstance(outcome, Config) and not unusable:
        origins = {key: origin_of(tree, key) for key, _ in flat(outcome)}
        return Loaded(outcome, origins, tree)
    found = unusable if isinstance(outcome, Config) else [*unusable, *outcome]
    raise ConfigErrors([*unread, *sorted(found, key=by_place)])


def _named_after(target: str) -> Entry:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(target).stem).lstrip("._-") or "run"
    return Entry({"name": Entry(name, DEFAULT)}, DEFAULT)


def explain(loaded: Loaded) -> list[tuple[str, object, Origin]]:
    """Key, value and origin of every value, in the order of the sections."""
    return [(key, value, loaded.origins[key]) for key, value in flat(loaded.config)]


def to_yaml(config: Config) -> str:
    """Every value as YAML; `load_config` reads it back equal."""
    return dump(config.model_dump(mode="json"))


def config_schema() -> dict[str, Any]:
    """JSON schema of a configuration file, for editors."""
    schema = Config.model_json_schema()
    extends = {"type": "string", "description": "Recipe or file to start from."}
    properties = {"extends": extends, **schema.pop("properties")}
    schema.pop("required", None)  # what a file leaves out comes from what it extends
    for definition in ({"properties": properties}, *schema["$defs"].values()):
        _loosen(definition)
    for name, node in root().fields.items():
        if node.shorthands:
            word = {"enum": list(node.shorthands), "description": "That section, by default."}
            properties[name] = {"anyOf": [properties[name], word], "description": node.expected}
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **schema, "properties": properties}


def _loosen(definition: dict[str, Any]) -> None:
    """A choice without its ``kind`` fits several sections: ``anyOf``, where pydantic has one."""
    for child in _choices(definition):
        child["anyOf"] = child.pop("oneOf")


def _choices(definition: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    return (child for child in definition["properties"].values() if "oneOf" in child)

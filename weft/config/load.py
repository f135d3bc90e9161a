"""A recipe's name or a YAML file, and overrides -> a checked `Config` that knows its origins."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from weft.config.check import by_place, check, flat
from weft.config.errors import ConfigError, ConfigErrors, show
from weft.config.names import nearest, nearest_name
from weft.config.plan_sections import PLAN_WAYS
from weft.config.schema import Node, nearest_key, root
from weft.config.sections import Config
from weft.config.tree import (
    COMMAND_LINE,
    DEFAULT,
    Entry,
    Origin,
    Reading,
    dump,
    find,
    origin_of,
    plain,
    scalar,
)

RECIPES = Path(__file__).parents[1] / "recipes"


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
            if re.split(r"[.\[]", error.key)[0] in Config.model_fields:  # else none of this one's
                error.where = error.where or str(origin_of(self.tree, error.key))
        return ConfigErrors(errors)


def load_config(target: str, overrides: Sequence[str] = (), *, over: Entry | None = None) -> Loaded:
    """Read a recipe or a file, what it extends, and ``key=value`` overrides, in rising order.

    ``over``: values that go on top of all these.

    Raises ConfigErrors with every problem of all of them at once.
    """
    unread: list[ConfigError] = []
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(target).stem).lstrip("._-") or "run"
    named = Entry({"name": Entry(name, DEFAULT)}, DEFAULT)
    layers = [named, *_read_layers(target, unread)]
    unusable: list[ConfigError] = []
    for text in overrides:
        try:
            layers.append(_override(text, root()))
        except ConfigError as error:
            error.where = str(COMMAND_LINE)
            unusable.append(error)
    layers += [] if over is None else [over]
    whole = (in_full(layer, root()) for layer in layers)
    tree = reduce(lambda base, over: merge(base, over, root()), whole)
    outcome = check(tree, has_gaps=bool(unread))
    if isinstance(outcome, Config) and not unusable:
        return _loaded(outcome, tree)
    found = unusable if isinstance(outcome, Config) else [*unusable, *outcome]
    raise ConfigErrors([*unread, *sorted(found, key=by_place)])


def on_top(loaded: Loaded, values: Mapping[str, Any]) -> Loaded:
    """With further values by section, as a program gives them; nobody wrote them.

    Raises ConfigErrors: with them it is not valid.
    """
    tree = merge(loaded.tree, in_full(_by_nobody(values), root()), root())
    outcome = check(tree, has_gaps=False)
    if not isinstance(outcome, Config):
        raise ConfigErrors(outcome)
    return _loaded(outcome, tree)


def _by_nobody(value: Any) -> Entry:
    if isinstance(value, Mapping):
        return Entry({key: _by_nobody(inner) for key, inner in value.items()}, DEFAULT)
    return Entry(value, DEFAULT)


def _loaded(config: Config, tree: Entry) -> Loaded:
    origins = {key: origin_of(tree, key) for key, _ in flat(config)}
    return Loaded(config, origins, tree)


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
        for child in definition["properties"].values():
            if "oneOf" in child:  # a choice without its kind fits several of its sections
                child["anyOf"] = child.pop("oneOf")
    for name, node in root().fields.items():
        if node.shorthands:
            word = {"enum": list(node.shorthands), "description": "That section, by default."}
            properties[name] = {"anyOf": [properties[name], word], "description": node.expected}
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **schema, "properties": properties}


@dataclass(frozen=True, slots=True)
class Source:
    """A recipe or a file that holds one layer."""

    path: Path
    label: str
    """What messages call it: ``demo.yaml``, or the path as the user wrote it."""
    is_recipe: bool

    def origin(self, line: int) -> Origin:
        return Origin("recipe" if self.is_recipe else "file", f"{self.label}:{line}")


def recipe_names() -> list[str]:
    """The recipes that come with Weft, sorted."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_summaries() -> dict[str, str]:
    """Name -> one line on what the recipe is for: the comment it begins with."""
    first = {name: (RECIPES / f"{name}.yaml").read_text("utf-8") for name in recipe_names()}
    return {name: text.partition("\n")[0].lstrip("# ") for name, text in first.items()}


def _read_layers(target: str, errors: list[ConfigError]) -> list[Entry]:
    """The target and what it extends, the most basic first. Problems are added to ``errors``."""
    layers: list[Entry] = []
    chain: list[Source] = []
    folder, asked = Path(), COMMAND_LINE
    while target:
        try:
            source = _locate(target, folder)
            paths = [each.path.resolve() for each in (*chain, source)]
            if paths[-1] in paths[:-1]:
                round_ = [*chain[paths.index(paths[-1]) :], source]
                circle = " -> ".join(each.label for each in round_)
                raise ConfigError("extends", target, "", f"extends goes in a circle: {circle}.")
        except ConfigError as error:
            error.where = str(asked)
            errors.append(error)
            break
        chain.append(source)
        values = dict(_read(source, errors))
        layers.insert(0, Entry(values, source.origin(1)))
        target, asked = _extends(values.pop("extends", None), errors)
        folder = source.path.parent
    return layers


def _locate(target: str, folder: Path) -> Source:
    if target in recipe_names():
        return Source(RECIPES / f"{target}.yaml", f"{target}.yaml", is_recipe=True)
    path = folder / target
    label = os.path.normpath(path)
    if path.is_file():
        return Source(path, label, is_recipe=False)
    if path.is_dir():
        inside = path / "config.yaml"
        way_out = f"did you mean '{inside}'?" if inside.is_file() else "a YAML file is needed."
        raise ConfigError("", target, "", f"'{label}' is a folder: {way_out}")
    if path.suffix in (".yaml", ".yml") or len(Path(target).parts) > 1:
        there = {file.stem: file for file in path.parent.glob("*.y*ml")}
        near = nearest(path.stem, there)
        way_out = f": did you mean '{there[near]}'?" if near else "."
        raise ConfigError("", target, "", f"there is no file '{label}'{way_out}")
    near = nearest_name(target, recipe_names(), cutoff=0.4)
    way_out = f"did you mean '{near}'? " if near else ""
    known = f"The recipes are {', '.join(recipe_names())}; a file of your own ends in .yaml."
    raise ConfigError("", target, "", f"unknown recipe '{target}': {way_out}{known}")


def _read(source: Source, errors: list[ConfigError]) -> Mapping[str, Entry]:
    """The values of one file; none where it cannot be read."""
    try:
        text = source.path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        errors.append(ConfigError("", None, "", f"cannot read '{source.label}': {reason}."))
        return {}
    reading = Reading(source.origin)
    entry = reading.read(text)
    errors += reading.errors
    if entry is not None and isinstance(entry.value, Mapping):
        return entry.value
    if not reading.errors:
        empty = entry is None or entry.value is None
        found = "is empty" if empty else "holds no 'key: value' pairs"
        hint = f"'{source.label}' {found}. A first line could be 'extends: demo'."
        errors.append(ConfigError("", None, "", hint, where=str(source.origin(1))))
    return {}


def said_by(path: Path) -> dict[str, Any]:
    """What a file says by itself: nothing of what it extends, and not looked at.

    Raises ConfigErrors: it cannot be read.
    """
    errors: list[ConfigError] = []
    values = _read(Source(path, str(path), is_recipe=False), errors)
    if errors:
        raise ConfigErrors(errors)
    return {key: plain(entry) for key, entry in values.items()}


def _extends(entry: Entry | None, errors: list[ConfigError]) -> tuple[str, Origin]:
    if entry is None:
        return "", COMMAND_LINE
    if isinstance(entry.value, str) and entry.value:
        return entry.value, entry.origin
    expected = "the name of a recipe or the path of a file"
    errors.append(ConfigError("extends", plain(entry), expected, where=str(entry.origin)))
    return "", entry.origin


def _override(text: str, root: Node) -> Entry:
    """``key=value`` as a layer."""
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        near = nearest_key(key) if key else ""
        node = root.at(near)
        example = f"{near}=VALUE" if node is not None and not node.fields else "optim.lr=0.001"
        raise ConfigError(key, None, "", f"'{text}' is not an override: write {example}.")
    entry = _value(raw.strip(), root.at(key), key)
    for part in reversed(key.split(".")):
        entry = Entry({part: entry}, COMMAND_LINE)
    return entry


def _value(raw: str, node: Node | None, key: str) -> Entry:
    """Text fields take what was written; others read it as YAML; numbers may go ``2,1``."""
    quoted = len(raw) > 1 and raw[0] == raw[-1] and raw[0] in "\"'"
    if quoted or raw.startswith(("[", "{")):
        return _yaml(raw, key)
    value = scalar(raw)
    if value is None or node is None:
        return Entry(value, COMMAND_LINE)
    if node.items is not None and node.items.kind in ("integer", "number"):
        parts = re.split(r"\s*,\s*", raw)
        return Entry([Entry(scalar(part), COMMAND_LINE) for part in parts], COMMAND_LINE)
    return Entry(raw if node.kind == "string" else value, COMMAND_LINE)


def _yaml(raw: str, key: str) -> Entry:
    reading = Reading(lambda _: COMMAND_LINE)
    entry = reading.read(raw)
    if entry is None or reading.errors:
        raise ConfigError(key, raw, "", f"{key} = {show(raw)}: {reading.errors[0]}")
    return entry


def in_full(entry: Entry, node: Node) -> Entry:
    """``plan: auto`` is short for ``plan: {auto: {}}``: an optional section by its name alone."""
    if isinstance(entry.value, str) and entry.value in node.shorthands:
        return Entry({entry.value: Entry({}, entry.origin)}, entry.origin)
    if not isinstance(entry.value, Mapping):
        return entry
    values = {
        key: in_full(child, node.fields[key]) if key in node.fields else child
        for key, child in entry.value.items()
    }
    return Entry(values, entry.origin)


def merge(base: Entry, over: Entry, root: Node) -> Entry:
    """One layer on top of another: sections key by key, anything else whole.

    Where ``over`` names another ``kind``, what ``base`` gave for keys that this kind lacks is left
    behind: ``optim.schedule.kind=cosine`` keeps the warm-up of a recipe and forgets its decay.
    Likewise, another way to say the plan leaves the plan of ``base`` behind, and ``plan.auto`` its
    micro-batches too. What the command line says stays.
    """
    assert isinstance(base.value, Mapping), "a layer is a section"
    before, now = (
        {
            way
            for way in PLAN_WAYS
            if (said := find(layer, f"plan.{way}")) and said.value is not None
        }
        for layer in (base, over)
    )
    values = dict(base.value)
    if now and not before & now:
        values |= _without(values, "plan", ".*")
    if "auto" in now - before:
        values |= _without(values, "batch", "micro|accumulation")
    return _merged(Entry(values, base.origin), over, root)


def _says(layer: Entry, way: str) -> bool:
    said = find(layer, f"plan.{way}")
    return said is not None and said.value is not None


def _without(values: Mapping[str, Entry], section: str, keys: str) -> Mapping[str, Entry]:
    """The section without what files say of some of its keys."""
    entry = values.get(section)
    if entry is None or not isinstance(entry.value, Mapping):
        return {}
    said = entry.value.items()
    kept = {k: e for k, e in said if e.origin == COMMAND_LINE or not re.fullmatch(keys, k)}
    return {section: Entry(kept, entry.origin)}


def _merged(base: Entry, over: Entry, node: Node | None) -> Entry:
    if not isinstance(base.value, Mapping) or not isinstance(over.value, Mapping):
        return over
    merged = dict(base.value)
    if node is not None and node.key in over.value and (kind := node.section_of(over.value)):
        merged = {k: e for k, e in merged.items() if k in kind.fields or e.origin == COMMAND_LINE}
    for key, entry in over.value.items():
        child = node and node.child(key)
        merged[key] = _merged(merged[key], entry, child) if key in merged else entry
    return Entry(merged, over.origin)

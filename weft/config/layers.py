"""From a recipe's name or a file, through ``extends``, to the overrides: one merged tree."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.config.errors import ConfigError, show
from weft.config.schema import Node, nearest_key
from weft.config.sections import PLAN_WAYS
from weft.config.tree import COMMAND_LINE, Entry, Origin, find, nested, plain
from weft.config.yaml_text import Reading, scalar

RECIPES = Path(__file__).parents[1] / "recipes"


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


def read_layers(target: str, errors: list[ConfigError]) -> list[Entry]:
    """The target and what it extends, the most basic first. Problems are added to ``errors``."""
    layers: list[Entry] = []
    chain: list[Source] = []
    folder, asked = Path(), COMMAND_LINE
    while target:
        try:
            source = _locate(target, folder)
            _refuse_circle([*chain, source])
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
        near = difflib.get_close_matches(path.stem, there, n=1)
        way_out = f": did you mean '{there[near[0]]}'?" if near else "."
        raise ConfigError("", target, "", f"there is no file '{label}'{way_out}")
    near = difflib.get_close_matches(target, recipe_names(), n=1, cutoff=0.4)
    way_out = f"did you mean '{near[0]}'? " if near else ""
    known = f"The recipes are {', '.join(recipe_names())}; a file of your own ends in .yaml."
    raise ConfigError("", target, "", f"unknown recipe '{target}': {way_out}{known}")


def _refuse_circle(chain: list[Source]) -> None:
    paths = [source.path.resolve() for source in chain]
    if paths[-1] in paths[:-1]:
        circle = " -> ".join(source.label for source in chain[paths.index(paths[-1]) :])
        raise ConfigError("extends", chain[-1].label, "", f"extends goes in a circle: {circle}.")


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
        found = (
            "is empty" if entry is None or entry.value is None else "holds no 'key: value' pairs"
        )
        hint = f"'{source.label}' {found}. A first line could be 'extends: demo'."
        errors.append(ConfigError("", None, "", hint, where=str(source.origin(1))))
    return {}


def _extends(entry: Entry | None, errors: list[ConfigError]) -> tuple[str, Origin]:
    if entry is None:
        return "", COMMAND_LINE
    if isinstance(entry.value, str) and entry.value:
        return entry.value, entry.origin
    expected = "the name of a recipe or the path of a file"
    errors.append(ConfigError("extends", plain(entry), expected, where=str(entry.origin)))
    return "", entry.origin


def read_overrides(overrides: Iterable[str], root: Node, errors: list[ConfigError]) -> list[Entry]:
    """Each ``key=value`` as a layer, in order. Problems are added to ``errors``."""
    layers = []
    for text in overrides:
        try:
            layers.append(_override(text, root))
        except ConfigError as error:
            error.where = str(COMMAND_LINE)
            errors.append(error)
    return layers


def _override(text: str, root: Node) -> Entry:
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        near = nearest_key(key) if key else ""
        node = root.at(near)
        example = f"{near}=VALUE" if node is not None and not node.fields else "optim.lr=0.001"
        raise ConfigError(key, None, "", f"'{text}' is not an override: write {example}.")
    return nested(key, _value(raw.strip(), root.at(key), key))


def _value(raw: str, node: Node | None, key: str) -> Entry:
    """Text fields take what was written; others read it as YAML; numbers may go ``2,1``."""
    quoted = len(raw) > 1 and raw[0] == raw[-1] and raw[0] in "\"'"
    if quoted or raw.startswith(("[", "{")):
        return _yaml(raw, key)
    value = scalar(raw)
    if value is None or node is None:
        return Entry(value, COMMAND_LINE)
    if node.items is not None and node.items.kind == "number":
        parts = re.split(r"\s*,\s*", raw)
        return Entry([Entry(scalar(part), COMMAND_LINE) for part in parts], COMMAND_LINE)
    return Entry(raw if node.kind == "text" else value, COMMAND_LINE)


def _yaml(raw: str, key: str) -> Entry:
    reading = Reading(lambda _: COMMAND_LINE)
    entry = reading.read(raw)
    if entry is None or reading.errors:
        raise ConfigError(key, raw, "", f"{key} = {show(raw)}: {reading.errors[0]}")
    return entry


def merge(base: Entry, over: Entry, node: Node | None) -> Entry:
    """``over`` on top of ``base``: sections key by key, anything else whole.

    Where ``over`` names another ``kind``, what ``base`` gave for keys that this kind lacks is left
    behind: ``optim.schedule.kind=cosine`` keeps the warm-up of a recipe and forgets its decay.
    Likewise, another way to say the plan leaves the plan of ``base`` behind, and ``plan.auto`` its
    micro-batches too.
    """
    if not isinstance(base.value, Mapping) or not isinstance(over.value, Mapping):
        return over
    merged = dict(base.value) if node is None else _staying(base.value, over.value, node)
    for key, entry in over.value.items():
        child = node.child(key) if node is not None else None
        merged[key] = merge(merged[key], entry, child) if key in merged else entry
    return Entry(merged, over.origin)


def _staying(base: Mapping[str, Entry], over: Mapping[str, Entry], node: Node) -> dict[str, Entry]:
    """What is not left behind of ``base``."""
    merged = dict(base)
    if node.key in over and plain(over[node.key]) in node.variants:
        fields = node.variants[str(plain(over[node.key]))].fields
        merged = {key: entry for key, entry in merged.items() if key in fields}
    if node.fields.keys() >= set(PLAN_WAYS):
        merged = _unless_replaced(merged, over)
    if "plan" in node.fields:
        merged = _without_microbatches(merged, over)
    return merged


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


def _unless_replaced(base: Mapping[str, Entry], over: Mapping[str, Entry]) -> dict[str, Entry]:
    """What stays of one plan under another. Two ways on one command line do not hide each other."""
    before, now = (
        {way for way in PLAN_WAYS if way in plan and plan[way].value is not None}
        for plan in (base, over)
    )
    if not now or before & now:
        return dict(base)
    return {key: entry for key, entry in base.items() if entry.origin == COMMAND_LINE}


def _without_microbatches(base: Mapping[str, Entry], over: Mapping[str, Entry]) -> dict[str, Entry]:
    """What stays of a configuration under one that begins to let the planner choose."""
    batch = base.get("batch")
    if (
        not _chooses(over)
        or _chooses(base)
        or batch is None
        or not isinstance(batch.value, Mapping)
    ):
        return dict(base)
    kept = {
        key: entry
        for key, entry in batch.value.items()
        if key not in ("micro", "accumulation") or entry.origin == COMMAND_LINE
    }
    return {**base, "batch": Entry(kept, batch.origin)}


def _chooses(values: Mapping[str, Entry]) -> bool:
    auto = find(Entry(values, COMMAND_LINE), "plan.auto")
    return auto is not None and auto.value is not None

"""Is a merged tree a valid configuration? Every problem, in words, with the place it came from."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from weft.config.batch import derive_batch
from weft.config.errors import ConfigError, ConfigErrors
from weft.config.schema import Node, nearest_key, node_of, one_of, root
from weft.config.sections import (
    AutoConfig,
    BatchConfig,
    Config,
    PlanConfig,
)
from weft.config.tree import COMMAND_LINE, DEFAULT, Entry, find, origin_of, plain
from weft.config.yaml_text import scalar

_Model = TypeVar("_Model", bound=BaseModel)

_SWITCHES = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def check(tree: Entry, *, has_gaps: bool) -> Config | list[ConfigError]:
    """The configuration that the tree describes, or everything that is wrong with it.

    A problem that only follows from another is left out. ``has_gaps``: a layer could not be read,
    so what is missing is no problem of its own.
    """
    found: list[ConfigError] = []
    data = _Sifting(root(), found).section(tree, root(), "")
    data = {name: {} for name, node in root().fields.items() if node.kind == "section"} | data
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        found += (_in_words(problem, tree, root()) for problem in _causes(error))
        parts = _valid_sections(data)
    else:
        parts = dict(config)
    faulty = {problem.key.partition(".")[0] for problem in found}
    if not has_gaps:
        sound = {name: part for name, part in parts.items() if name not in faulty}
        found += _broken_rules(sound, tree)
    problems = _placed(found, tree)
    if has_gaps:
        return [problem for problem in problems if problem.where != str(DEFAULT)]
    return problems or config


def check_file(tree: Entry, model: type[_Model]) -> _Model:
    """What a file that is no configuration describes, such as a cluster.

    Raises:
        ConfigErrors: everything that is wrong with it.
    """
    found: list[ConfigError] = []
    data = _Sifting(node_of(model), found).section(tree, node_of(model), "")
    try:
        checked = model.model_validate(data)
    except ValidationError as error:
        found += (_in_words(problem, tree, node_of(model)) for problem in _causes(error))
    if found:
        raise ConfigErrors(sorted(_placed(found, tree), key=by_place))
    return checked


def flat(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted key and value of every field that is not a section, in the order of the sections."""
    for name, value in config:
        key = prefix + name
        if isinstance(value, BaseModel):
            yield from flat(value, f"{key}.")
        elif isinstance(value, tuple) and any(isinstance(item, BaseModel) for item in value):
            for number, item in enumerate(value):
                yield from flat(item, f"{key}[{number}].")
        else:
            yield key, value


@dataclass(frozen=True, slots=True)
class _Sifting:
    """Plain values without unknown keys and misplaced sections, which go to ``found``."""

    top: Node
    """Of the whole file."""
    found: list[ConfigError]

    def value(self, entry: Entry, node: Node, key: str) -> object:
        if entry.value is None and node.kind == "section" and node.nullable:
            return None
        if node.kind in ("section", "choice"):
            return self.section(entry, node, key)
        if node.items is not None and isinstance(entry.value, list):
            items = enumerate(entry.value)
            return [self.value(item, node.items, f"{key}[{i}]") for i, item in items]
        value = plain(entry)
        if node.integer and isinstance(value, float) and value.is_integer():
            return int(value)  # 1e4 steps
        return value

    def section(self, entry: Entry, node: Node, key: str) -> dict[str, object]:
        if not isinstance(entry.value, Mapping):
            value = plain(entry)
            hint = f"Write {key}.kind={value}." if value in node.words else ""
            self.found.append(ConfigError(key, value, node.expected, hint))
            return {"kind": node.words[0]} if node.words else {}
        result: dict[str, object] = {}
        section = node
        if node.variants:
            kind = _kind(entry.value, node)
            if kind not in node.words:
                words, hint = one_of(node.words), _near_word(kind, node)
                self.found.append(ConfigError(f"{key}.kind", kind, words, hint))
                return {"kind": node.words[0]}
            section = node.variants[kind]
            result["kind"] = kind
        prefix = f"{key}." if key else ""
        for name, child in entry.value.items():
            if name not in section.fields:
                self.found.append(self._unknown(prefix, name, child, section))
            elif name not in result:
                result[name] = self.value(child, section.fields[name], prefix + name)
        return result

    def _unknown(self, prefix: str, name: str, entry: Entry, section: Node) -> ConfigError:
        key = prefix + name
        siblings = [prefix + field for field in section.fields]
        if not prefix and entry.origin != COMMAND_LINE and self.top is root():
            siblings.append("extends")
        while isinstance(entry.value, Mapping) and len(entry.value) == 1:
            ((inner, entry),) = entry.value.items()
            key = f"{key}.{inner}"
        known = self.top.at(key) is not None
        near = "" if known else nearest_key(key, siblings, self.top)
        if known and "." in name:
            outer, _, leaf = key.rpartition(".")
            way_out = f"in a file, write '{leaf}' inside the section '{outer}'."
        elif ":" in name:
            way_out = "a space goes after ':'."
        elif near:
            way_out = f"did you mean '{near}'?"
        else:
            way_out = f"the keys here are {', '.join(section.fields)}."
        return ConfigError(
            key, None, "", f"unknown key '{key}': {way_out}", where=str(entry.origin)
        )


def _kind(given: Mapping[str, Entry], node: Node) -> str:
    return str(plain(given["kind"])) if "kind" in given else node.default_variant


def _causes(error: ValidationError) -> list[Mapping[str, Any]]:
    """The problems of a list's entries, without "too short" of a list that lacks just those."""
    problems = error.errors()
    places = [problem["loc"] for problem in problems]
    return [
        problem
        for problem, loc in zip(problems, places, strict=True)
        if not any(other[: len(loc)] == loc and len(other) > len(loc) for other in places)
    ]


def _in_words(problem: Mapping[str, Any], tree: Entry, top: Node) -> ConfigError:
    """pydantic's account of one problem -> ours."""
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    key, node = _place(problem["loc"], top)
    entry = find(tree, key)
    if entry is None:
        around = str(origin_of(tree, key.rpartition(".")[0]))
        return ConfigError(key, None, node.expected, "It has to be given.", where=around)
    value = plain(entry)
    return ConfigError(key, value, node.expected, _hint(value, node))


def _place(loc: tuple[int | str, ...], top: Node) -> tuple[str, Node]:
    """pydantic's location -> dotted key and node; a list of plain values is one place."""
    key, node = "", top
    for part in loc:
        name = str(part)
        if node.items is not None and node.items.kind == "section":
            key, node = f"{key}[{name}]", node.items
        elif name in node.variants:
            node = node.variants[name]
        elif name in node.fields:
            key, node = f"{key}.{name}" if key else name, node.fields[name]
        else:
            break
    return key, node


def _hint(value: object, node: Node) -> str:
    if node.kind == "number" and isinstance(value, str) and not isinstance(scalar(value), str):
        return "Remove the quotes."
    if node.kind == "flag" and str(value).lower() in _SWITCHES:
        return f"Write {_SWITCHES[str(value).lower()]}."
    if node.kind == "list":
        return "A list is written [a, b]." if not isinstance(value, list) else ""
    if node.kind != "text":
        return ""
    if node.words:
        return _near_word(value, node)
    if isinstance(value, bool | int | float):
        return "Put it in quotes."
    return "It is empty." if value == "" else ""


def _near_word(value: object, node: Node) -> str:
    near = difflib.get_close_matches(str(value), node.words, n=1)
    return f"Did you mean '{near[0]}'?" if near else ""


def _valid_sections(data: Mapping[str, object]) -> dict[str, object]:
    parts: dict[str, object] = {}
    for name, field in Config.model_fields.items():
        section = field.annotation
        if not isinstance(section, type) or not issubclass(section, BaseModel):
            continue
        try:
            parts[name] = section.model_validate(data[name])
        except ValidationError:
            continue  # reported with the whole
    return parts


def _broken_rules(parts: Mapping[str, object], tree: Entry) -> Iterator[ConfigError]:
    """Rules between sections, as far as the sections that they need are sound."""
    match parts:
        case {"batch": BatchConfig() as batch, "plan": PlanConfig(auto=AutoConfig())}:
            yield from _unfit_for_auto(batch)
        case {"batch": BatchConfig() as batch, "plan": PlanConfig(file=None) as plan}:
            origins = {f"batch.{name}": origin_of(tree, f"batch.{name}") for name, _ in batch}
            try:
                derive_batch(batch, plan.batch_shares or (1,), origins)
            except ConfigError as error:
                yield error


def _unfit_for_auto(batch: BatchConfig) -> Iterator[ConfigError]:
    """The planner needs the samples of a step, and itself cuts them into micro-batches."""
    if batch.samples is None:
        hint = "The planner divides them among the processes."
        yield ConfigError("batch.samples", None, "the samples of a step, with plan.auto", hint)
    if batch.accumulation is not None:
        hint = "It follows from batch.micro, or from what the planner chooses for it."
        yield ConfigError("batch.accumulation", batch.accumulation, "null with plan.auto", hint)


def _placed(found: list[ConfigError], tree: Entry) -> list[ConfigError]:
    """The problems with their places; what only follows from another is left out."""
    kept: list[ConfigError] = []
    for problem in found:
        below = [re.escape(other.key) for other in kept]
        if below and re.match(rf"({'|'.join(below)})($|[.\[])", problem.key):
            continue
        problem.where = problem.where or str(origin_of(tree, problem.key))
        kept.append(problem)
    return kept


def by_place(problem: ConfigError) -> tuple[int, str, int]:
    """Sorting key: files and their lines first, then the command line."""
    match = re.fullmatch(r"at (.*):(\d+)(?: \(recipe\))?", problem.where)
    if match is None:
        return 1, problem.where, 0
    return 0, match[1], int(match[2])

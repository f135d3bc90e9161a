"""Is a merged tree a valid configuration? pydantic finds out; this puts what it found in words.

Every problem at once, each with its key, its value, what is allowed and where it was written.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from weft.config.batch import derive_batch
from weft.config.errors import ConfigError, ConfigErrors
from weft.config.schema import Node, nearest_key, node_of, one_of, root
from weft.config.sections import BatchConfig, Config, PlanConfig
from weft.config.tree import COMMAND_LINE, DEFAULT, Entry, find, origin_of, plain
from weft.config.yaml_text import scalar

_Model = TypeVar("_Model", bound=BaseModel)
_Location = Sequence[int | str]
"""Where pydantic met a problem: keys, numbers in lists, kinds of sections."""

_SWITCHES = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def check(tree: Entry, *, has_gaps: bool) -> Config | list[ConfigError]:
    """The configuration that the tree describes, or everything that is wrong with it.

    A problem that only follows from another is left out. ``has_gaps``: a layer could not be read,
    so what is missing is no problem of its own.
    """
    sections = (name for name, node in root().fields.items() if node.kind == "section")
    data = {name: {} for name in sections} | _data(tree, root())
    config, found = _validated(Config, data, tree, root())
    if not has_gaps and not any(re.match(r"(batch|plan)\b", problem.key) for problem in found):
        found += _broken_rules(data, tree)
    problems = _placed(found, tree)
    if has_gaps:
        return [problem for problem in problems if problem.where != str(DEFAULT)]
    return problems if config is None or problems else config


def check_file(tree: Entry, model: type[_Model]) -> _Model:
    """What a file that is no configuration describes, such as a cluster.

    Raises:
        ConfigErrors: everything that is wrong with it.
    """
    checked, found = _validated(model, _data(tree, node_of(model)), tree, node_of(model))
    if checked is None:
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


def _data(entry: Entry, node: Node | None) -> Any:
    """Plain values as sections take them: 1e4 is an integer, a choice says which it is."""
    value = entry.value
    if isinstance(value, Mapping):
        which = {node.key: node.default_variant} if node is not None and node.variants else {}
        return which | {key: _data(child, node and node.child(key)) for key, child in value.items()}
    if isinstance(value, list):
        return [_data(item, node and node.items) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _validated(
    model: type[_Model], data: Any, tree: Entry, top: Node
) -> tuple[_Model | None, list[ConfigError]]:
    """The model, or all problems of its data: also those that unknown keys would hide."""
    try:
        return model.model_validate(data), []
    except ValidationError as error:
        problems = _causes(error)
    unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
    for *path, name in (problem["loc"] for problem in unknown):
        section = data
        for part in path:  # the kind of a section is a part of a location and no key
            section = section[part] if isinstance(section, list) or part in section else section
        del section[name]
    others = _validated(model, data, tree, top)[1] if unknown else []
    return None, [_in_words(problem, tree, top) for problem in unknown or problems] + others


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
    if problem["type"] == "extra_forbidden":
        return _unknown_key(problem["loc"], tree, top)
    key, node = _place(problem["loc"], top)
    entry = find(tree, key)
    if entry is None:
        around = str(origin_of(tree, key.rpartition(".")[0]))
        return ConfigError(key, None, node.expected, "It has to be given.", where=around)
    if problem["type"].startswith("union_tag"):
        assert isinstance(entry.value, Mapping), f"{key} has a {node.key}"
        which = plain(entry.value[node.key]) if node.key in entry.value else ""
        return ConfigError(f"{key}.{node.key}", which, one_of(node.words), _near_word(which, node))
    value = plain(entry)
    is_word = node.kind == "choice" and value in node.words
    hint = f"Write {key}.{node.key}={value}." if is_word else _hint(value, node)
    return ConfigError(key, value, node.expected, hint)


def _unknown_key(loc: _Location, tree: Entry, top: Node) -> ConfigError:
    around, section = _place(loc[:-1], top)
    name, prefix = str(loc[-1]), f"{around}." if around else ""
    parent = find(tree, around)
    assert parent is not None and isinstance(parent.value, Mapping), f"{around} has {name}"
    entry, key = parent.value[name], prefix + name
    from_file = entry.origin != COMMAND_LINE
    while isinstance(entry.value, Mapping) and len(entry.value) == 1:
        ((inner, entry),) = entry.value.items()
        key = f"{key}.{inner}"
    siblings = [prefix + field for field in section.fields]
    if not prefix and from_file and top is root():
        siblings.append("extends")
    way_out = _instead(key, name, siblings, top)
    way_out = way_out or f"the keys here are {', '.join(section.fields)}."
    return ConfigError(key, None, "", f"unknown key '{key}': {way_out}", where=str(entry.origin))


def _instead(key: str, name: str, siblings: Sequence[str], top: Node) -> str:
    """What the unknown key was probably meant to be; empty if nothing is near."""
    known = top.at(key) is not None
    if known and "." in name:
        outer, _, leaf = key.rpartition(".")
        return f"in a file, write '{leaf}' inside the section '{outer}'."
    if ":" in name:
        return "a space goes after ':'."
    near = "" if known else nearest_key(key, siblings, top)
    return f"did you mean '{near}'?" if near else ""


def _place(loc: _Location, top: Node) -> tuple[str, Node]:
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


def _broken_rules(data: Mapping[str, Any], tree: Entry) -> Iterator[ConfigError]:
    """Rules between sections that are valid."""
    batch = BatchConfig.model_validate(data["batch"])
    plan = PlanConfig.model_validate(data["plan"])
    if plan.auto is not None:
        yield from _unfit_for_auto(batch)
    elif plan.file is None:
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

"""Is a merged tree a valid configuration? pydantic finds out; this puts what it found in words.

Every problem at once, each with its key, its value, what is allowed and where it was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from weft.config.batch import derive_batch
from weft.config.errors import ConfigError, ConfigErrors
from weft.config.names import nearest_name
from weft.config.plan_sections import PlanConfig
from weft.config.schema import Node, nearest_key, node_of, one_of, root
from weft.config.sections import BatchConfig, Config
from weft.config.tree import COMMAND_LINE, DEFAULT, Entry, find, origin_of, plain, scalar
from weft.config.values import MOST

_Model = TypeVar("_Model", bound=BaseModel)

_OTHER_VALUES = (
    ("fp16", ("float16", "half"), "Did you mean 'fp16'?"),
    ("fp8", ("float8", "e4m3"), "Did you mean 'fp8'?"),
    ("bf16", ("int8", "int4", "fp4", "nvfp4", "mxfp8"), "Of 8 bits or less there is fp8 alone."),
    ("bf16", ("bfloat16", "mixed"), "Did you mean 'bf16'?"),
    ("fp32", ("tf32",), "TF32 is compute.precision=fp32 with compute.tf32=true."),
    ("fp32", ("float32", "float", "single"), "Did you mean 'fp32'?"),
    ("fp64", ("float64", "double"), "Did you mean 'fp64'?"),
)
"""(a word that is allowed, values of other programs in its place, what to say of those)."""
_SWITCHES = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def check(tree: Entry, *, has_gaps: bool) -> Config | list[ConfigError]:
    """The configuration that the tree describes, or everything that is wrong with it.

    ``has_gaps``: a layer could not be read, so what is missing is no problem of its own.
    """
    checking = _Checking(tree, root())
    data = {"data": {}} | checking.data(tree, root())
    config = checking.validated(Config, data)
    if not has_gaps and not any(re.match(r"(batch|plan)\b", each.key) for each in checking.found):
        checking.found += _broken_rules(data, tree)
    problems = checking.placed()
    if has_gaps:
        return [problem for problem in problems if problem.where != str(DEFAULT)]
    return problems if config is None or problems else config


def check_file(tree: Entry, model: type[_Model]) -> _Model:
    """What a file that is no configuration describes, such as a cluster.

    Raises ConfigErrors: everything that is wrong with it.
    """
    checking = _Checking(tree, node_of(model))
    checked = checking.validated(model, checking.data(tree, node_of(model)))
    if checked is None or checking.found:
        raise ConfigErrors(sorted(checking.placed(), key=by_place))
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


class _Checking:
    """A tree against what its file may hold; every problem is added to ``found``."""

    def __init__(self, tree: Entry, top: Node) -> None:
        self.found: list[ConfigError] = []
        self._tree, self._top = tree, top

    def data(self, entry: Entry, node: Node | None, key: str = "") -> Any:
        """Plain values as sections take them: 1e4 is an integer, a choice says which it is."""
        value = entry.value
        if isinstance(value, list):
            items = enumerate(value)
            return [self.data(item, node and node.items, f"{key}[{n}]") for n, item in items]
        if isinstance(value, Mapping):
            return plain(entry) if node is None else self._section(value, node, key)
        return int(value) if isinstance(value, float) and value.is_integer() else value

    def _section(self, values: Mapping[str, Entry], node: Node, key: str) -> dict[str, Any]:
        """Unknown keys are problems, and left out, so that they hide no others."""
        data = {node.key: node.default_variant} if node.variants else {}
        section = node.section_of(values)
        for name, child in values.items():
            inner = f"{key}.{name}" if key else name
            if section is None or name in section.fields:
                data[name] = self.data(child, node.child(name), inner)
            else:
                self._unknown_key(inner, name, child, section)
        return data

    def validated(self, model: type[_Model], data: Any) -> _Model | None:
        """The model; None where its data are none."""
        try:
            return model.model_validate(data)
        except ValidationError as error:
            problems = error.errors()
        for problem in problems:
            # A list that is too short only because its entries have problems has none itself.
            loc = problem["loc"]
            if all(other["loc"] == loc or other["loc"][: len(loc)] != loc for other in problems):
                self.found.append(self._in_words(problem))
        return None

    def placed(self) -> list[ConfigError]:
        """The problems with their places; what only follows from another is left out."""
        kept: list[ConfigError] = []
        for problem in self.found:
            above = tuple(other.key + end for other in kept for end in ".[")
            if not f"{problem.key}.".startswith(above):
                problem.where = problem.where or str(origin_of(self._tree, problem.key))
                kept.append(problem)
        return kept

    def _unknown_key(self, key: str, name: str, entry: Entry, section: Node) -> None:
        prefix = key.removesuffix(name)
        siblings = [prefix + field for field in section.fields]
        if section is root() and entry.origin != COMMAND_LINE:
            siblings.append("extends")
        while isinstance(entry.value, Mapping) and len(entry.value) == 1:
            ((inner, entry),) = entry.value.items()
            key = f"{key}.{inner}"
        is_known = self._top.at(key) is not None
        near = "" if is_known else nearest_key(key, siblings, self._top)
        if is_known and "." in name:
            outer, _, leaf = key.rpartition(".")
            way_out = f"in a file, write '{leaf}' inside the section '{outer}'."
        elif ":" in name:
            way_out = "a space goes after ':'."
        elif near:
            way_out = f"did you mean '{near}'?"
        else:
            way_out = f"the keys here are {', '.join(section.fields)}."
        sentence = f"unknown key '{key}': {way_out}"
        self.found.append(ConfigError(key, None, "", sentence, where=str(entry.origin)))

    def _in_words(self, problem: Mapping[str, Any]) -> ConfigError:
        """pydantic's account of one problem -> ours."""
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            return cause
        key, node = self._place(problem["loc"])
        entry = find(self._tree, key)
        if entry is None:
            around = str(origin_of(self._tree, key.rpartition(".")[0]))
            return ConfigError(key, None, node.expected, "It has to be given.", where=around)
        value = plain(entry)
        if problem["type"].startswith("union_tag"):
            assert isinstance(value, Mapping), f"{key} has a {node.key}"
            which = value.get(node.key, "")
            key, expected = f"{key}.{node.key}", one_of(node.words)
            return ConfigError(key, which, expected, _near_word(which, node))
        return ConfigError(key, value, node.expected, _hint(key, value, node))

    def _place(self, loc: Sequence[int | str]) -> tuple[str, Node]:
        """Keys, numbers in lists and kinds of sections, as pydantic says where a problem is, ->
        dotted key and node; a list of plain values is one place."""
        key, node = "", self._top
        for name in map(str, loc):
            if node.items is not None and node.items.kind == "object":
                key, node = f"{key}[{name}]", node.items
            elif name in node.variants:
                node = node.variants[name]
            elif name in node.fields:
                key, node = f"{key}.{name}" if key else name, node.fields[name]
            else:
                break
        return key, node


def _is_huge(value: object) -> bool:
    """More than fits; such numbers are read as words."""
    try:
        return float(str(value)) > MOST
    except ValueError:
        return False


def _hint(key: str, value: object, node: Node) -> str:
    """The way out where a value is a usual mistake."""
    match node.kind:
        case "choice" if value in node.words:
            return f"Write {key}.{node.key}={value}."
        case "integer" | "number" if isinstance(value, str) and not isinstance(scalar(value), str):
            return "Remove the quotes."
        case "integer" if " to " not in node.expected and _is_huge(value):
            return "It is 2^63 - 1 at most."
        case "boolean" if str(value).lower() in _SWITCHES:
            return f"Write {_SWITCHES[str(value).lower()]}."
        case "array" if not isinstance(value, list):
            return "A list is written [a, b]."
        case "string" if node.words:
            return _near_word(value, node)
        case "string" if isinstance(value, bool | int | float):
            return "Put it in quotes."
        case "string" if value == "":
            return "It is empty."
    return ""


def _near_word(value: object, node: Node) -> str:
    """Of allowed texts, the one that was likely meant; why not, where the value is known."""
    for word, others, hint in _OTHER_VALUES:
        if word in node.words and str(value).lower() in others:
            return hint
    near = nearest_name(str(value), node.words)
    return f"Did you mean '{near}'?" if near else ""


def _broken_rules(data: Mapping[str, Any], tree: Entry) -> Iterator[ConfigError]:
    """Rules between sections that are valid."""
    batch = BatchConfig.model_validate(data.get("batch", {}))
    plan = PlanConfig.model_validate(data.get("plan", {}))
    if plan.auto is None and plan.file is None:
        origins = {f"batch.{name}": origin_of(tree, f"batch.{name}") for name, _ in batch}
        try:
            derive_batch(batch, plan.batch_shares or (1,), origins)
        except ConfigError as error:
            yield error
    if plan.auto is not None and batch.samples is None:
        hint = "The planner divides them among the processes."
        yield ConfigError("batch.samples", None, "the samples of a step, with plan.auto", hint)
    if plan.auto is not None and batch.accumulation is not None:
        hint = "It follows from batch.micro, or from what the planner chooses for it."
        yield ConfigError("batch.accumulation", batch.accumulation, "null with plan.auto", hint)


def by_place(problem: ConfigError) -> tuple[int, str, int]:
    """Sorting key: files and their lines first, then the command line."""
    match = re.fullmatch(r"at (.*):(\d+)(?: \(recipe\))?", problem.where)
    return (1, problem.where, 0) if match is None else (0, match[1], int(match[2]))

"""Values as they were written, each with the place it came from: read from YAML, and written to
read back equal.

The reader follows YAML 1.2's core words, because 1.1's traps bite here: ``3e-4`` is a number,
``no`` and ``1:30`` are text, and a key given twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import yaml

from weft.config.errors import ConfigError

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Origin:
    """Who gave a value."""

    kind: Literal["default", "recipe", "file", "command line"]
    where: str = ""
    """``demo.yaml:12`` for a recipe or a file, else empty."""

    def __str__(self) -> str:
        if self.where:
            return f"at {self.where}" + " (recipe)" * (self.kind == "recipe")
        return "by default" if self.kind == "default" else "on the command line"


DEFAULT = Origin("default")
COMMAND_LINE = Origin("command line")


@dataclass(frozen=True, slots=True)
class Entry:
    """One value and its origin; sections and lists hold entries."""

    value: Scalar | Mapping[str, Entry] | list[Entry]
    origin: Origin


def plain(entry: Entry) -> object:
    """The value alone."""
    if isinstance(entry.value, Mapping):
        return {key: plain(child) for key, child in entry.value.items()}
    if isinstance(entry.value, list):
        return [plain(child) for child in entry.value]
    return entry.value


def find(entry: Entry, key: str) -> Entry | None:
    """The entry at a dotted key such as ``data.sources[1].path``; None where nothing is given."""
    for part in re.findall(r"[^.\[\]]+", key):
        value = entry.value
        if isinstance(value, Mapping) and part in value:
            entry = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            entry = value[int(part)]
        else:
            return None
    return entry


def origin_of(tree: Entry, key: str) -> Origin:
    """Where the value at ``key`` was given: its own line, else ``DEFAULT``."""
    entry = find(tree, key)
    return DEFAULT if entry is None else entry.origin


_DIGITS = r"[0-9]{1,20}(?:_[0-9]{1,20}){0,6}"
_INT = re.compile(rf"[-+]?{_DIGITS}")
_FLOAT = re.compile(
    rf"[-+]?(?:\.[0-9]{{1,40}}|{_DIGITS}(?:\.[0-9]{{0,40}})?)(?:[eE][-+]?[0-9]{{1,5}})?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_TAG = "tag:yaml.org,2002:"
_WORD = "word"
"""Text without quotes or a tag: what it means is for ``scalar`` to say."""
_TAGS = {
    _WORD,
    *(f"{_TAG}{name}" for name in ("map", "seq", "str", "null", "bool", "int", "float")),
}

_PLAINER = (
    ("'\\t' that cannot start any token", "a tab stands before a word; indent with spaces"),
    ("cannot start any token", "text that begins with a special character needs quotes"),
    (
        "mapping values are not allowed",
        "a second ':' in a line, a line indented too far, or one above without its ':'",
    ),
    (
        "expected <block end>",
        "this line is indented unlike the ones above, or has a bracket too many",
    ),
    ("could not find expected ':'", "a line has no ':'"),
    ("found another document", "a second document begins here; one file holds one"),
    ("expected the node content", "a bracket, comma or '-' stands where a value should be"),
    ("undefined alias", "text that begins with '*' needs quotes"),
    ("unexpected end of stream", "a quote or bracket is not closed"),
    ("found unexpected end", "a quote or bracket is not closed"),
    ("expected ',' or", "a bracket is not closed, or a comma is missing"),
)
"""PyYAML's words for a broken text -> what a person should look for."""


class _Loader(yaml.SafeLoader):
    """Leaves the meaning of words to us."""


_Loader.yaml_implicit_resolvers = {}
_Loader.add_implicit_resolver(_WORD, re.compile(""), None)


MOST_VALUES = 100_000
"""Of a text, with what ``*`` repeats: a few lines can say billions."""


class _TooManyError(Exception):
    """Values."""


@dataclass(slots=True)
class Reading:
    """A text being turned into entries; problems collect in ``errors``."""

    origin: Callable[[int], Origin]
    """Line number, from 1 -> origin."""
    errors: list[ConfigError] = field(default_factory=list)
    _num_values: int = 0

    def read(self, text: str) -> Entry | None:
        """The text's one value; None when it cannot be read at all, or holds nothing."""
        try:
            node = yaml.compose(text, _Loader)
            return None if node is None else self._entry(node, "", ())
        except (RecursionError, _TooManyError):
            hint = f"values lie too deep in each other, or are more than {MOST_VALUES:,} with '*'."
            self._problem(1, hint)
            return None
        except yaml.MarkedYAMLError as error:
            problem, mark = error.problem or str(error), error.problem_mark
            plainer = next((words for part, words in _PLAINER if part in problem), problem)
            self._problem(mark.line + 1 if mark else 1, f"this is not YAML: {plainer}.")
            return None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            self._problem(line, "this is not YAML: a control character stands in the text.")
            return None

    def _problem(self, line: int, sentence: str) -> None:
        self.errors.append(ConfigError("", None, "", sentence, where=str(self.origin(line))))

    def _entry(self, node: yaml.Node, key: str, above: tuple[yaml.Node, ...]) -> Entry:
        line = node.start_mark.line + 1
        origin = self.origin(line)
        self._num_values += 1
        if self._num_values > MOST_VALUES:
            raise _TooManyError
        if node in above:
            self._problem(line, f"'{key}' contains itself through '*'; write the value out.")
            return Entry("*", origin)
        if node.tag not in _TAGS:
            self._problem(line, f"'{key}' has the tag {node.tag!r}; only plain values are read.")
        if isinstance(node, yaml.MappingNode):
            return Entry(self._mapping(node, key, (*above, node)), origin)
        if isinstance(node, yaml.SequenceNode):
            items = enumerate(node.value)
            return Entry([self._entry(n, f"{key}[{i}]", (*above, node)) for i, n in items], origin)
        text = str(node.value)
        return Entry(text if node.tag == f"{_TAG}str" else scalar(text), origin)

    def _mapping(
        self, node: yaml.MappingNode, key: str, above: tuple[yaml.Node, ...]
    ) -> Mapping[str, Entry]:
        result: dict[str, Entry] = {}
        for name_node, value_node in node.value:
            line = name_node.start_mark.line + 1
            if not isinstance(name_node, yaml.ScalarNode):
                self._problem(line, "a key is a list or a section; keys are plain words.")
                continue
            name = name_node.value
            dotted = f"{key}.{name}" if key else name
            if name in result:
                first = str(result[name].origin)
                self._problem(line, f"key '{dotted}' is given twice; the first is {first}.")
                continue
            entry = self._entry(value_node, dotted, above)
            result[name] = Entry(entry.value, self.origin(line))
        return result


def scalar(text: str) -> Scalar:
    """One unquoted word -> its value: ``3e-4`` a number, ``null`` None, ``1:30`` text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or our reader would take for something other than text."""


def _list(dumper: _Dumper, items: list[object]) -> yaml.Node:
    """Plain values side by side, sections below each other."""
    side_by_side = not any(isinstance(item, Mapping) for item in items)
    return dumper.represent_sequence(f"{_TAG}seq", items, flow_style=side_by_side)


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Line breaks that are no newlines survive only as escapes, between double quotes."""
    style = None if isinstance(scalar(text), str) else "'"
    style = style if set("\x85\u2028\u2029").isdisjoint(text) else '"'
    return dumper.represent_scalar(f"{_TAG}str", text, style=style)


_Dumper.add_representer(list, _list)
_Dumper.add_representer(str, _text)


def dump(data: Mapping[str, object]) -> str:
    """Plain data -> YAML text, in the order given; lists of plain values on one line."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)

"""Values as they were written, each with the place it came from, and how layers of them combine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Origin:
    """Who gave a value."""

    kind: Literal["default", "recipe", "file", "command line"]
    where: str = ""
    """``demo.yaml:12`` for a recipe or a file, else empty."""

    def __str__(self) -> str:
        match self.kind:
            case "default":
                return "by default"
            case "command line":
                return "on the command line"
            case "recipe":
                return f"at {self.where} (recipe)"
        return f"at {self.where}"


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


def nested(key: str, entry: Entry) -> Entry:
    """``optim.lr`` and an entry -> the tree that holds this entry alone."""
    for part in reversed(key.split(".")):
        entry = Entry({part: entry}, entry.origin)
    return entry

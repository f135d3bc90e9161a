"""Things that a person asks for by name: each in a file of its own, those of a kind in a registry.

A registry finds its entries by looking into a folder, so that adding one is adding a file.
Installed packages bring others through entry points, and a program adds its own with ``add``. What
is found is imported when somebody first asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules
from typing import Protocol, TypeVar

from weft.config.errors import ConfigError


class Named(Protocol):
    """What every entry says of itself."""

    @property
    def name(self) -> str:
        """As configurations and plans write it."""

    @property
    def order(self) -> int:
        """Its place where names are listed. The first is what nobody chose otherwise."""


Entry = TypeVar("Entry", bound=Named)


class Registry(Mapping[str, Entry]):
    """Entries by name: ours in their order, those that were added, those of installed packages.

    Args:
        package: Our own are in its modules.
        entry: Name of the constant that holds one; a module without it is none.
        folder: Where each entry is a folder: the module in it that holds the constant.
        group: Entry points of installed packages. What one of them names is an entry, or a class
            whose instance is one; its package is imported when the name is first asked for.
    """

    def __init__(self, package: str, *, entry: str, group: str, folder: str = "") -> None:
        self._package, self._folder = package, folder
        self._entry, self._group = entry, group
        self._added: dict[str, Entry] = {}

    def add(self, entry: Entry) -> None:
        """Add one to this process."""
        assert entry.name not in self._loaded(), f"{entry.name} is there already"
        self._added[entry.name] = entry

    def remove(self, name: str) -> None:
        """Take away one that was added."""
        del self._added[name]

    def named(self, key: str, name: str) -> Entry:
        """The entry of this name.

        Raises:
            ConfigError: there is none; ``key`` is where the name was written.
        """
        if name in self:
            return self[name]
        raise unknown_name(key, name, self)

    def __getitem__(self, name: str) -> Entry:
        loaded = self._loaded()
        if name in loaded:
            return loaded[name]
        found = self._outside[name].load()
        entry: Entry = found() if isinstance(found, type) else found
        assert entry.name == name, f"{self._outside[name]} brings {entry.name}"
        self._added[name] = entry
        return entry

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*self._loaded(), *sorted(self._outside)])

    def __len__(self) -> int:
        return len({*self._loaded(), *self._outside})

    def __contains__(self, name: object) -> bool:
        return name in self._loaded() or name in self._outside

    def _loaded(self) -> dict[str, Entry]:
        return {**self._own, **self._added}

    @cached_property
    def _own(self) -> dict[str, Entry]:
        """Those in our folder."""
        found: list[Entry] = []
        for module in iter_modules(import_module(self._package).__path__):
            if module.ispkg == bool(self._folder):
                address = f"{self._package}.{module.name}.{self._folder}".rstrip(".")
                constants = vars(import_module(address))
                found += [constants[self._entry]] if self._entry in constants else []
        found.sort(key=lambda entry: (entry.order, entry.name))
        return {entry.name: entry for entry in found}

    @cached_property
    def _outside(self) -> dict[str, EntryPoint]:
        """Those of installed packages, by name."""
        return {point.name: point for point in entry_points(group=self._group)}


def unknown_name(key: str, name: str, known: Iterable[str]) -> ConfigError:
    """What to say of a name that is none of those known."""
    words = list(known)
    near = get_close_matches(name, words, n=1)
    hint = f"Did you mean {near[0]}?" if near else ""
    return ConfigError(key, name, f"one of {', '.join(words)}", hint)

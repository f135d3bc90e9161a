"""Things that a person asks for by name: each in a file of its own, those of a kind in a registry.

A registry finds its entries by looking into a folder, so that adding one is adding a file.
Installed packages bring others through entry points, and a program adds its own with ``add``. What
is found is imported when somebody first asks.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from contextlib import redirect_stdout, suppress
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules
from typing import Any, Protocol, TypeVar

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

    Names are all there are. ``items`` and ``values`` pass over what an installed package cannot
    bring: who names that is told why.

    Args:
        kind: Of every entry.
        package: Our own are in its modules.
        entry: Name of the constant that holds one; a module without it is none.
        folder: Where each entry is a folder: the module in it that holds the constant.
        group: Entry points of installed packages. What one of them names is an entry, or a class
            whose instance is one; its package is imported when the name is first asked for.
    """

    def __init__(
        self, kind: type[Any], package: str, *, entry: str, group: str, folder: str = ""
    ) -> None:
        self._kind, self._package, self._folder = kind, package, folder
        self._entry, self._group = entry, group
        self._failed: dict[str, ConfigError] = {}

    def add(self, entry: Entry) -> None:
        """Add one to this process."""
        assert entry.name not in self, f"{entry.name} is there already"
        self._found[entry.name] = entry

    def remove(self, name: str) -> None:
        """Take away one that was added."""
        del self._found[name]

    def named(self, key: str, name: str) -> Entry:
        """The entry of this name.

        Raises ConfigError: there is none; ``key`` is where the name was written.
        """
        if name in self:
            return self[name]
        raise unknown_name(key, name, self)

    def imported(self) -> tuple[Entry, ...]:
        """Those that are here without importing an installed package."""
        return tuple(each for each in self._found.values() if not isinstance(each, EntryPoint))

    def __getitem__(self, name: str) -> Entry:
        found = self._found[name]
        if isinstance(found, EntryPoint):
            if name in self._failed:  # tried once
                raise self._failed[name]
            try:
                found = self._found[name] = self._brought(found)
            except ConfigError as error:
                self._failed[name] = error
                raise
        return found

    def _brought(self, point: EntryPoint) -> Entry:
        """By an installed package, which is imported now.

        Raises ConfigError: it cannot be, or brings something else.
        """
        key = f"{self._group}: {point.name}"
        entry: Entry = imported(key, point, _object)
        if not isinstance(entry, self._kind):
            expected = f"a {self._kind.__module__}.{self._kind.__name__}"
            raise ConfigError(key, point.value, expected, f"It is a {type(entry).__name__}.")
        if entry.name != point.name:
            said = f"Its name is {entry.name!r}."
            raise ConfigError(key, point.value, "an entry of that name", said)
        return entry

    def items(self) -> ItemsView[str, Entry]:
        """Those that there are in fact."""
        return self._working().items()

    def values(self) -> ValuesView[Entry]:
        """Those that there are in fact."""
        return self._working().values()

    def _working(self) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for name in self:
            with suppress(ConfigError):
                found[name] = self[name]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def ours(self) -> list[Entry]:
        """Those in our folder, imported now."""
        ours: list[Entry] = []
        for module in iter_modules(import_module(self._package).__path__):
            if module.ispkg == bool(self._folder):
                address = f"{self._package}.{module.name}.{self._folder}".rstrip(".")
                constants = vars(import_module(address))
                ours += [constants[self._entry]] if self._entry in constants else []
        return sorted(ours, key=lambda entry: (entry.order, entry.name))

    @cached_property
    def _found(self) -> dict[str, Entry | EntryPoint]:
        """Those in our folder, and where installed packages have theirs."""
        ours = self.ours()
        outside = sorted(entry_points(group=self._group), key=lambda point: point.name)
        found: dict[str, Entry | EntryPoint] = {entry.name: entry for entry in ours}
        return found | {point.name: point for point in outside if point.name not in found}


def _object(found: Any) -> Any:
    """An entry, or one of a class."""
    return found() if isinstance(found, type) else found


def imported(key: str, point: EntryPoint, taken: Callable[[Any], Any] = lambda found: found) -> Any:
    """What an entry point of an installed package names, as it is ``taken``; what the package
    prints meanwhile goes to standard error, beside what a command prints.

    Raises ConfigError: it cannot be imported, whatever goes wrong in it. ``key`` says what.
    """
    try:
        with redirect_stdout(sys.stderr):
            return taken(point.load())
    except (Exception, SystemExit) as error:
        expected = "something that can be imported from an installed package"
        said = f"{type(error).__name__}: {error}."
        raise ConfigError(key, point.value, expected, said) from error


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known one most like a name, by this part of their letters; empty when none is."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known name that somebody who wrote ``name`` likely meant; empty when none is.

    Names differ in more than letters: fp16 is not fp64, an h100 no a100, a gpu no cpu. So numbers
    must be the same, up to digits that changed places, and short words begin alike.
    """
    words = list(known)
    letters = Counter(map(_letters, words))
    likely = [w for w in words if _may_mean(name, w, is_only=letters[_letters(w)] == 1)]
    return nearest(name, likely, cutoff)


_NUMBER = re.compile(r"[0-9]+")


def _letters(word: str) -> str:
    return re.sub(r"[\W_0-9]", "", word.lower())


def _may_mean(name: str, word: str, *, is_only: bool) -> bool:
    """``is_only``: no other word has these letters with other numbers."""
    if len(name) <= 4 and name[:1].lower() != word[:1].lower():
        return False
    said, its = ([sorted(number) for number in _NUMBER.findall(each)] for each in (name, word))
    if not its:
        return not said or _letters(name) == _letters(word)
    if not said:
        return is_only
    few, many = sorted((said, its), key=len)
    rest = iter(many)
    begins = {_letters(_NUMBER.split(each, maxsplit=1)[0]) for each in (name, word)}
    is_alike = len(begins) == 1 or min(map(len, begins)) > 2
    return is_alike and all(number in rest for number in few)


def unknown_name(key: str, name: str, known: Iterable[str]) -> ConfigError:
    """What to say of a name that is none of those known."""
    words = list(known)
    near = nearest_name(name, words)
    hint = f"Did you mean {near}?" if near else ""
    return ConfigError(key, name, f"one of {', '.join(words)}", hint)


_ADDRESSES: dict[str, str] = {}


def provide(kind: str, address: str) -> None:
    """Say where the registry of a kind of things is: ``package.module:CONSTANT``.

    A configuration is read by the lowest package, and what it names is in packages above, which
    that one does not know: whoever puts Weft together (``weft/__init__.py``) tells it.
    """
    _ADDRESSES[kind] = address


def registry_of(kind: str) -> Registry[Any]:
    """The registry of "families", "devices" and so on, imported now."""
    registry = EntryPoint(kind, _ADDRESSES[kind], group="").load()
    assert isinstance(registry, Registry), f"{_ADDRESSES[kind]} is no registry"
    return registry


def names_of(kind: str) -> tuple[str, ...]:
    """What a configuration may name."""
    return tuple(registry_of(kind))


def import_ours() -> None:
    """Import all that is in our folders, so that processes which are forked later need not."""
    for kind in _ADDRESSES:
        registry_of(kind).ours()


def every_name() -> tuple[str, ...]:
    """All names of all kinds: a key for what is kept as long as none is added."""
    return tuple(f"{kind}:{name}" for kind in _ADDRESSES for name in names_of(kind))

"""Names of machines, as people write them down. They end in commands, so no other text passes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from weft.config.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_MANY = re.compile(r"([A-Za-z0-9._-]*)\[([0-9]{1,7})-([0-9]{1,7})\]([A-Za-z0-9._-]*)")
MOST_NAMES = 1_000_000


def host_names(written: Sequence[str], key: str) -> tuple[str, ...]:
    """Every name; ``gpu[01-16]`` is sixteen.

    Raises:
        ConfigError: what is no name of a host, or comes twice.
    """
    names = [name for text in written for name in _each(text, key)]
    for name in names:
        refuse_no_host(name, key)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(key, twice, "every host once")
    return tuple(names)


def is_host(name: str) -> bool:
    """A text is a name of a host, and nothing that a shell would read otherwise."""
    return _NAME.fullmatch(name) is not None


def refuse_no_host(name: str, key: str) -> None:
    """Raises ConfigError where a text is no name of a host."""
    if not is_host(name):
        expected = "a name of a host: letters, digits, dots, dashes and underscores"
        raise ConfigError(key, name, expected, "gpu[01-16] names sixteen.")


def _each(text: str, key: str) -> Iterator[str]:
    found = _MANY.fullmatch(text)
    if found is None:
        yield text
        return
    before, first, last, after = found.groups()
    if not 0 <= int(last) - int(first) < MOST_NAMES:
        raise ConfigError(key, text, f"rising numbers in brackets, at most {MOST_NAMES:,} names")
    width = len(first) if len(first) == len(last) else 0
    for number in range(int(first), int(last) + 1):
        yield f"{before}{number:0{width}}{after}"

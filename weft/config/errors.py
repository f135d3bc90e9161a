"""What the user wrote and cannot be used: one problem, or every problem found at once."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping

STOPPED = 75
"""Exit code of what was asked to stop and can go on (``EX_TEMPFAIL`` of sysexits.h)."""


class RunError(RuntimeError):
    """Something outside the program went wrong: a disk, a process, a damaged file.

    ``str()`` says all that a person needs; commands print it and exit with ``exit_code``.
    """

    exit_code = 1
    is_loss = False
    """Somebody outside ended a process that is needed: what begins again may well go on."""


class DivergedError(RunError):
    """Training goes on with numbers that are none: every rank stops, and saves nothing."""

    exit_code = 76


class PassedOver(UserWarning):
    """Something of the user's cannot be used, and is not needed: all goes on without it."""


class ConfigError(ValueError):
    """A value the user wrote cannot be used. Names the key, the value and what would do.

    ``expected`` completes "expected ..."; where it is empty the problem is not with a value (an
    unknown key, a broken file), and ``hint`` is the whole sentence.
    """

    def __init__(
        self, key: str, value: object, expected: str, hint: str = "", *, where: str = ""
    ) -> None:
        super().__init__(key, value, expected, hint)
        self.key = key
        """Dotted key, such as ``optim.lr``."""
        self.value = value
        self.expected = expected
        self.hint = hint
        """The way out: one sentence, or empty."""
        self.where = where
        """``at my.yaml:4`` or ``on the command line``; empty when not known."""

    def __str__(self) -> str:
        if not self.expected:
            return self.hint
        text = f"{self.key} = {show(self.value)}: expected {self.expected}."
        return f"{text} {self.hint}" if self.hint else text


class ConfigErrors(ValueError):  # noqa: N818 - several errors, so a plural
    """Everything that is wrong with one configuration. ``str()`` is what a command prints."""

    def __init__(self, errors: Iterable[ConfigError]) -> None:
        self.errors = tuple(errors)
        super().__init__(self.errors)

    def __str__(self) -> str:
        lines = ["error: the configuration is not valid"]
        for error in self.errors:
            lines.append(f"  {error}")
            if error.where:
                lines.append(f"      {error.where}")
        return "\n".join(lines)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def no_room(error: OSError) -> str:
    """What there is to say where a file could not be written for want of room; else empty. Such
    errors often name no file."""
    if error.errno not in _FULL:
        return ""
    where = f"{error.filename}: " if error.filename else ""
    way = (
        "Make room where it writes (weft runs prune NAME --checkpoints removes older ones of a run)"
    )
    return f"{where}{error.strerror}. {way}, and give the same command again"


def show(value: object) -> str:
    """A value as YAML writes it: ``null``, ``true``, ``[2, 1]``, ``'text'``; cut when long."""
    text = _flow(value)
    return text if len(text) <= 160 else f"{text[:150]} ..."


def _flow(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_flow(inner)}' for key, inner in value.items())}}}"
    return repr(value)

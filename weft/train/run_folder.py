"""A run's folder: one command at a time works in it, and a refused one leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

from weft.config.errors import ConfigError

LOGS = "logs"
"""In the run folder: what ranks print."""


class RunFolder:
    """Holds a run's folder while a command works in it. A context manager.

    Creates the folder, and on leaving removes what it created and nobody put anything into. Where
    the file system knows no locks, two commands are not kept apart.

    Raises:
        ConfigError: the folder cannot be created or written, or another command holds it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made: list[Path] = []
        self._handle = -1
        self._had_logs = (path / LOGS).exists()

    def __enter__(self) -> RunFolder:
        hint = "Choose another folder with --out."
        try:
            self._create()
            self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            self._remove_empty()
            expected = "a folder that can be written"
            raise ConfigError("--out", str(self.path), expected, hint) from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._handle)
            expected = "a folder that no other `weft train` is working in"
            raise ConfigError("--out", str(self.path), expected, f"{hint[:-1]}, or wait.") from None
        except OSError:
            pass  # a network file system without locks
        return self

    def __exit__(self, *_: object) -> None:
        self._remove_empty()
        os.close(self._handle)

    def drop_new_logs(self) -> None:
        """The ranks refused to begin: leave none of their logs where there were none before.

        Under a launcher another rank may have been here first, so a folder of logs alone is new.
        """
        is_new = all(entry.name == LOGS for entry in self.path.iterdir())
        if is_new or not self._had_logs:
            shutil.rmtree(self.path / LOGS, ignore_errors=True)
        if is_new and not self._made:
            self._made.append(self.path)

    def _create(self) -> None:
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            self._made.append(folder)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise PermissionError(f"{self.path} cannot be written")

    def _remove_empty(self) -> None:
        with suppress(OSError):  # the first that is not empty, or was removed by somebody else
            for folder in reversed(self._made):
                folder.rmdir()


def write_text(path: Path, text: str) -> None:
    """Give a file a new content at once: whoever reads it sees the old one or the new one."""
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)

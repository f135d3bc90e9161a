"""A disk that can be made full: the run's checkpoints on a file system of their own, in memory.

It starts with what the folder holds, and at the end the folder holds what it held. Full means that
its limit is lowered to what it holds: whoever writes more gets the kernel's own error.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from weft.config.errors import RunError
from weft.lab.identity import Identity
from weft.lab.tools import call
from weft.platform.mounts import mounts

_WHOLE = "50%"
"""Of the machine's memory: the limit of a disk that is not full."""
_TRIES = 20


class SmallDisk:
    """Holds ``folder`` while it is mounted."""

    def __init__(self, identity: Identity, folder: Path) -> None:
        self._name = identity.name
        self._folder = folder.resolve()
        self._is_mounted = False

    def mount(self) -> None:
        """Put the disk in the folder's place, with what the folder holds."""
        before = _aside(self._folder, self._name, "before")
        if self._folder.exists():
            self._folder.rename(before)
        self._folder.mkdir(parents=True)
        mode = stat.S_IMODE((before if before.exists() else self._folder).stat().st_mode)
        options = f"size={_WHOLE},mode={mode:o}"
        try:
            call(["mount", "-t", "tmpfs", "-o", options, self._name, str(self._folder)])
        except RunError:
            _restore(self._folder, before)
            raise
        self._is_mounted = True
        if before.exists():
            shutil.copytree(before, self._folder, symlinks=True, dirs_exist_ok=True)
            before.rename(_aside(self._folder, self._name, "copied"))

    def fill(self) -> None:
        """From now on, no byte more."""
        for _ in range(_TRIES):  # somebody may be writing
            state = os.statvfs(self._folder)
            used = (state.f_blocks - state.f_bfree) * state.f_frsize
            try:
                self._limit(str(max(used, state.f_frsize)))
            except RunError:
                continue
            return
        raise RunError(f"the disk at {self._folder} cannot be made full: it grows too fast")

    def empty(self) -> None:
        """There is room again."""
        self._limit(_WHOLE)

    def _limit(self, size: str) -> None:
        call(["mount", "-o", f"remount,size={size}", str(self._folder)])

    def unmount(self) -> None:
        """Leave an ordinary folder behind, with what is on the disk."""
        if self._is_mounted:
            put_back(self._folder, self._name)
            self._is_mounted = False


def mounted(text: str) -> Iterator[tuple[str, Path]]:
    """(lab's name, folder) of every disk in ``/proc/self/mounts``."""
    return ((source, folder) for source, folder in mounts(text) if Identity.of_name(source))


def put_back(folder: Path, name: str) -> None:
    """Turn the disk of the lab ``name`` at ``folder`` into a folder with the same content.

    Where the disk had not yet taken over all that the folder held, the folder is as it was.
    """
    before, copied, after = (_aside(folder, name, when) for when in ("before", "copied", "after"))
    if before.exists():
        call(["umount", str(folder)])
        _restore(folder, before)
        return
    shutil.rmtree(after, ignore_errors=True)
    shutil.copytree(folder, after, symlinks=True)
    call(["umount", str(folder)])
    folder.rmdir()
    after.rename(folder)
    shutil.rmtree(copied, ignore_errors=True)


def _restore(folder: Path, before: Path) -> None:
    """Put what was there in the place of an empty folder."""
    folder.rmdir()
    if before.exists():
        before.rename(folder)


def _aside(folder: Path, name: str, when: str) -> Path:
    return folder.with_name(f".{folder.name}-{when}-{name}")

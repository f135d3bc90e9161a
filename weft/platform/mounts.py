"""What is mounted where, as the kernel tells it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def mounts(text: str) -> Iterator[tuple[str, Path]]:
    """(source, folder) of every line of ``/proc/self/mounts``, read as latin-1."""
    for line in text.splitlines():
        source, folder, *_ = line.split()
        # The kernel writes a space as \040 and so on.
        path = folder.encode("latin-1").decode("unicode_escape").encode("latin-1")
        yield source, Path(os.fsdecode(path))


def mounts_here() -> list[tuple[str, Path]]:
    """Of this machine; none where its kernel does not say."""
    try:
        return list(mounts(Path("/proc/self/mounts").read_text("latin-1")))
    except OSError:
        return []

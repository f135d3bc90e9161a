"""Folders of storage that knows no renaming: what is removed first, and what was left."""

from __future__ import annotations

from collections.abc import Collection

from weft.checkpoint.remote.path import RemotePath

INDEX = "index.json"


def remove_folder(folder: RemotePath) -> None:
    """Remove a checkpoint, its index first: what is left of it counts for nothing.

    Raises OSError where the storage refuses.
    """
    (folder / INDEX).unlink()
    keep_only(folder, ())
    folder.rmdir()


def keep_only(folder: RemotePath, names: Collection[str]) -> None:
    """Remove all other files of a folder."""
    for entry in folder.iterdir():
        if entry.name not in names:
            entry.unlink()

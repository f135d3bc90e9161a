"""The folders that commands read checkpoints from, and those that they write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.output import err
from weft.config.errors import ConfigError

if TYPE_CHECKING:
    from weft.checkpoint.reader import Checkpoint

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER", help="A run's folder, its checkpoints folder, or one checkpoint."
    ),
]
To = Annotated[Path, typer.Option("--to", help="Folder to write; must not hold anything yet.")]


def refuse_missing(folder: Path) -> None:
    """A folder to read from has to be there."""
    if not folder.is_dir():
        expected = "a folder that exists: a run's, or a checkpoint's"
        raise ConfigError("FOLDER", str(folder), expected)


def refuse_filled(folder: Path) -> None:
    """A folder to write must not hold anything yet: nothing is ever overwritten."""
    expected = "a folder that is new or empty"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("--to", str(folder), expected)
    nearest = next(parent for parent in folder.absolute().parents if parent.exists())
    if not nearest.is_dir():
        raise ConfigError("--to", str(folder), expected, f"{nearest} is a file.")


def open_saved(folder: Path) -> Checkpoint:
    """The checkpoint that the user named; how it was chosen goes to standard error.

    Raises:
        ConfigError: there is no such folder, or nothing was ever saved in it.
        CheckpointError: what is there is damaged.
    """
    from weft.checkpoint.reader import checkpoints_root, is_checkpoint, open_checkpoint
    from weft.checkpoint.store import candidates

    refuse_missing(folder)
    if not is_checkpoint(folder) and not candidates(checkpoints_root(folder)):
        expected = "a run's folder or a checkpoint"
        raise ConfigError("FOLDER", str(folder), expected, "No checkpoint was saved there.")
    checkpoint = open_checkpoint(folder)
    for note in checkpoint.notes:
        err.print(f"note: {note}", markup=False)
    return checkpoint

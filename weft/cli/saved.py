"""``weft report``, and the folders that commands read from and write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.output import err, out, print_json
from weft.cli.target import Json
from weft.config.errors import ConfigError

if TYPE_CHECKING:
    from weft.checkpoint.place import Place
    from weft.checkpoint.reader import Checkpoint

Folder = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER",
        help="A run's folder, its checkpoints folder, or one checkpoint; or the address of one: "
        "s3://BUCKET/PREFIX, sftp://[USER@]HOST[:PORT]/PATH.",
    ),
]
To = Annotated[Path, typer.Option("--to", help="Folder to write; must not hold anything yet.")]


def named_place(folder: str) -> Place:
    """What the user named; it has to be there.

    Raises:
        ConfigError: there is no such folder, or it is an address that cannot be opened.
        CheckpointError: the storage cannot be reached.
    """
    from weft.checkpoint.entry import told
    from weft.checkpoint.place import place_of

    place = place_of(folder)
    with told("read", place):
        is_there = place.is_dir()
    if not is_there:
        expected = "a folder that exists: a run's, or a checkpoint's"
        raise ConfigError("FOLDER", folder, expected)
    return place


def refuse_filled(folder: Path, key: str = "--to") -> None:
    """A folder to write must not hold anything yet: nothing is ever overwritten."""
    expected = "a folder that is new or empty"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(key, str(folder), expected)
    nearest = next(parent for parent in folder.absolute().parents if parent.exists())
    if not nearest.is_dir():
        raise ConfigError(key, str(folder), expected, f"{nearest} is a file.")


def open_saved(folder: str) -> Checkpoint:
    """The checkpoint that the user named; how it was chosen goes to standard error.

    Raises:
        ConfigError: there is no such folder, or nothing was ever saved in it.
        CheckpointError: what is there is damaged.
    """
    from weft.checkpoint.reader import checkpoints_root, is_checkpoint, open_checkpoint
    from weft.checkpoint.store import candidates

    place = named_place(folder)
    if not is_checkpoint(place) and not candidates(checkpoints_root(place)):
        expected = "a run's folder or a checkpoint"
        raise ConfigError("FOLDER", folder, expected, "No checkpoint was saved there.")
    checkpoint = open_checkpoint(place)
    for note in checkpoint.notes:
        err.print(f"note: {note}")
    return checkpoint


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The run's folder.")],
    json: Json = False,
) -> None:
    """Write report.html from the files of a run, finished or not."""
    from weft.report.page import write_report
    from weft.report.run_files import read_run

    if not (folder / "plan.json").is_file():
        raise ConfigError("FOLDER", str(folder), "the folder of a run (it holds plan.json)")
    page = write_report(folder)
    if json:
        profile = read_run(folder).profile
        print_json({"report": str(page)} | ({"profile": profile} if profile else {}))
    else:
        out.print(f"wrote {page}")

"""``weft checkpoint``: look at saved runs, check them, and trade with Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.table import Table

from weft.cli.output import count, err, finish, gib, out, print_json
from weft.cli.target import Json
from weft.config.errors import ConfigError
from weft.data.cache import TOKENIZER_FILE

app = typer.Typer(help="List, show, check, export and import checkpoints.", no_args_is_help=True)

Where = Annotated[
    Path, typer.Argument(help="A run's folder, its checkpoints folder, or one checkpoint.")
]


To = Annotated[Path, typer.Option("--to", help="Folder to write; must not hold anything yet.")]


@app.command("ls")
def ls(where: Where, json: Json = False) -> None:
    """List the checkpoints of a run."""
    from weft.checkpoint.listing import list_checkpoints

    listed = _found(where, lambda: list_checkpoints(where))
    if json:
        print_json({"checkpoints": [{**asdict(e), "complete": e.complete} for e in listed]})
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("step", "saved", "size", "parameters", "ranks", "state"):
        table.add_column(column)
    for entry in listed:
        state = "complete" if entry.complete else f"damaged: {entry.problem}"
        table.add_row(
            str(entry.step),
            f"{datetime.fromtimestamp(entry.saved_at):%F %T}" if entry.saved_at else "",
            gib(entry.bytes),
            count(entry.num_params),
            str(entry.world_size or ""),
            state + (", latest" if entry.latest else ""),
        )
    out.print(table)


@app.command("show")
def show(where: Where, json: Json = False) -> None:
    """Show what one checkpoint holds: tensors, step, model and plan."""
    from weft.checkpoint.listing import describe
    from weft.checkpoint.reader import open_checkpoint

    checkpoint = _found(where, lambda: open_checkpoint(where))
    found = describe(checkpoint)
    if json:
        print_json({**asdict(found), "notes": checkpoint.notes})
        return
    for note in checkpoint.notes:
        err.print(f"note: {note}", markup=False)
    listed = found.listed
    out.print(f"[bold]{listed.folder}[/], step {listed.step}, written by weft {found.weft}")
    for kind in found.kinds:
        elements, size = count(kind.num_elements), gib(kind.bytes)
        dtypes = " ".join(kind.dtypes)
        out.print(f"  {kind.kind:<12} {kind.num_tensors} tensors, {elements}, {size}, {dtypes}")
    for name, shape in found.shapes.items():
        out.print(f"  {name:<40} {' x '.join(map(str, shape))}", markup=False)


@app.command("verify")
def verify(where: Where, json: Json = False) -> None:
    """Read every byte and compare sizes and checksums. Exit code 1 if anything is wrong."""
    from weft.checkpoint.verify import verify as verify_files

    found = verify_files(where)
    if json:
        print_json(asdict(found))
    else:
        for problem in found.problems:
            out.print(problem, style="red", markup=False)
        verdict = "[green]sound[/]" if found.ok else f"[red]{len(found.problems)} problem(s)[/]"
        out.print(f"{found.files} files, {gib(found.bytes)}: {verdict}")
    finish(0 if found.ok else 1)


@app.command("export")
def export(where: Where, to: To, json: Json = False) -> None:
    """Write a checkpoint as a Hugging Face folder that `transformers` opens as it is."""
    from weft.checkpoint.convert import export_hf
    from weft.checkpoint.reader import open_checkpoint

    _refuse_filled(to)
    checkpoint = _found(where, lambda: open_checkpoint(where))
    export_hf(checkpoint, to, tokenizer_file=_tokenizer_beside(checkpoint.folder))
    _tell({"exported": str(to), "step": checkpoint.step}, json=json)


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face folder with safetensors files.")],
    to: To,
    json: Json = False,
) -> None:
    """Make a run folder whose step 0 holds the weights of a Hugging Face model.

    Go on with `weft train --out FOLDER` and a matching model section, or `weft generate FOLDER`.
    """
    from weft.checkpoint.convert import import_hf

    _refuse_filled(to)
    checkpoint = import_hf(folder, to / "checkpoints")
    _tell({"imported": str(checkpoint), "into": str(to)}, json=json)


T = TypeVar("T")


def _found(where: Path, read: Callable[[], T]) -> T:
    """What ``read`` finds; the user's mistake if there is no such place."""
    if not where.exists():
        raise ConfigError("checkpoint", str(where), "a folder that exists")
    return read()


def _refuse_filled(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError("--to", str(folder), "a folder that is new or empty")


def _tokenizer_beside(checkpoint: Path) -> Path | None:
    """The run's tokenizer, kept two folders up from each checkpoint."""
    path = checkpoint.parent.parent / TOKENIZER_FILE
    return path if path.is_file() else None


def _tell(facts: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(facts)
    else:
        out.print("  ".join(f"{key} {value}" for key, value in facts.items()), markup=False)

"""``weft checkpoint``: look at saved runs, check them, and trade with Hugging Face."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from weft.cli.output import COLUMNS, err, finish, out, print_json, print_table
from weft.cli.saved import Folder, To, named_place, open_saved, refuse_filled
from weft.cli.target import Json
from weft.config.errors import ConfigError
from weft.report.units import count, gib

MODEL_FILE = "model.yaml"
"""In the folder of an imported model: its configuration."""

app = typer.Typer(help="List, show, check, export and import checkpoints.", no_args_is_help=True)


@app.command("ls")
def ls(folder: Folder, json: Json = False) -> None:
    """List the checkpoints of a run."""
    from weft.checkpoint.listing import list_checkpoints

    listed = list_checkpoints(named_place(folder))
    if json:
        print_json({"checkpoints": [{**asdict(e), "complete": e.complete} for e in listed]})
        return
    if not listed:
        out.print(f"no checkpoint in {folder}")
        return
    rows = [
        (
            str(entry.step),
            f"{datetime.fromtimestamp(entry.saved_at):%F %T}" if entry.saved_at else "",
            gib(entry.bytes),
            count(entry.num_params),
            str(entry.world_size or ""),
            ("complete" if entry.complete else f"damaged: {entry.problem}")
            + ", not finite" * (not entry.finite)
            + ", latest" * entry.latest,
        )
        for entry in listed
    ]
    headers = ("step", "saved", "size", "parameters", "ranks", "state")
    print_table(headers, rows, header_style="dim", **COLUMNS)


@app.command("show")
def show(folder: Folder, json: Json = False) -> None:
    """Show what one checkpoint holds: tensors, step, model and plan."""
    from weft.checkpoint.listing import describe

    checkpoint = open_saved(folder)
    found = describe(checkpoint)
    if json:
        print_json({**asdict(found), "notes": checkpoint.notes})
        return
    listed = found.listed
    out.print(listed.folder, style="bold", end="")
    out.print(f", step {listed.step}, written by weft {found.weft}")
    for kind in found.kinds:
        elements, size = count(kind.num_elements), gib(kind.bytes)
        dtypes = " ".join(kind.dtypes)
        out.print(f"  {kind.kind:<12} {kind.num_tensors} tensors, {elements}, {size}, {dtypes}")
    for name, shape in found.shapes.items():
        out.print(f"  {name:<40} {' x '.join(map(str, shape))}")


@app.command("verify")
def verify(folder: Folder, json: Json = False) -> None:
    """Read every byte and compare sizes and checksums. Exit code 1 if anything is wrong."""
    from weft.checkpoint.verify import verify as verify_files

    found = verify_files(named_place(folder))
    if json:
        print_json(asdict(found))
    else:
        for problem in found.problems:
            out.print(problem, style="red")
        verdict = "[green]sound[/]" if found.ok else f"[red]{len(found.problems)} problem(s)[/]"
        out.print(f"{found.files} files, {gib(found.bytes)}: {verdict}", markup=True)
    finish(0 if found.ok else 1)


@app.command("diff")
def diff(
    first: Folder,
    second: Annotated[
        str, typer.Argument(help="Another one, saved under any plan.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Name every tensor of two checkpoints that is not the same. Exit code 1 then.

    Plans may differ: tensors are compared whole, by their names in the unsplit model.
    """
    from weft.checkpoint.diff import differences

    found = list(differences(open_saved(first), open_saved(second)))
    if json:
        print_json({"equal": not found, "differences": [asdict(each) for each in found]})
    for each in found if not json else ():
        out.print(f"{each.what}: {each.problem}")
    if not (found or json):
        out.print("equal", style="green")
    finish(1 if found else 0)


@app.command("convert")
def convert(
    source: Folder,
    target: Annotated[
        Path,
        typer.Argument(metavar="TARGET", help="Folder to write; must not hold anything yet."),
    ],
    to: Annotated[
        Literal["dcp", "weft"],
        typer.Option("--to", help="dcp: of `torch.distributed.checkpoint`; weft: a run's folder."),
    ],
    json: Json = False,
) -> None:
    """Convert a checkpoint to or from a folder of `torch.distributed.checkpoint`, and compare.

    There a parameter NAME is `model.NAME`, and what the optimizer keeps `optim.state.NAME.KIND`:
    `dcp.load` puts them into `{"model": ..., "optim": {"state": ...}}`. What is read from there
    has to have the names that `weft checkpoint show` lists. No pickle is executed: entries that are
    no tensors are named and left out. Example: `weft checkpoint convert runs/mine out --to dcp`.
    """
    from weft.checkpoint.dcp import METADATA, from_dcp, to_dcp

    refuse_filled(target, "TARGET")
    if to == "dcp":
        found = to_dcp(open_saved(source), target)
    else:
        place = named_place(source)
        if not isinstance(place, Path) or not (place / METADATA).is_file():
            expected = f"a folder of torch.distributed.checkpoint on this machine, with {METADATA}"
            raise ConfigError("FOLDER", source, expected)
        found = from_dcp(place, target / "checkpoints")
    if json:
        print_json(asdict(found))
        return
    words = f"{found.num_tensors} tensors of step {found.step}, compared with what was read"
    out.print(f"{found.place}: {words}")
    if found.left_out:
        out.print(f"left out: {', '.join(found.left_out)}")


@app.command("export")
def export(folder: Folder, to: To, json: Json = False) -> None:
    """Write a checkpoint as a Hugging Face folder that `transformers` opens as it is."""
    from weft.checkpoint.convert import export_hf
    from weft.data.cache import TOKENIZER_FILE
    from weft.data.tokenizer import load_tokenizer

    refuse_filled(to)
    checkpoint = open_saved(folder)
    tokenizer = checkpoint.run / TOKENIZER_FILE if checkpoint.run is not None else None
    if tokenizer is not None and tokenizer.is_file():
        load_tokenizer(tokenizer)  # or what is wrong with it
    else:
        tokenizer = None
        err.print(f"note: {folder} has no {TOKENIZER_FILE}, nor will {to}")
    export_hf(checkpoint, to, tokenizer_file=tokenizer)
    _tell({"exported": str(to), "step": checkpoint.step}, json=json)


@app.command("import")
def import_(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="A Hugging Face folder with safetensors files."),
    ],
    to: To,
    json: Json = False,
) -> None:
    """Make a run folder whose step 0 holds the weights of a Hugging Face model, and its tokenizer.

    Its model.yaml says which model and tokenizer these are. Go on with `weft generate TO`, or with
    `weft train FILE --out TO`, where FILE has the line `extends: TO/model.yaml`. A new run that
    begins with such weights needs no import: `weft train demo --init FOLDER`.
    """
    from weft.checkpoint.convert import import_hf
    from weft.config.tree import dump
    from weft.data.cache import TOKENIZER_FILE
    from weft.data.tokenizer import copy_tokenizer
    from weft.models.config_folder import read_spec, section_of

    refuse_filled(to)
    said: dict[str, Any] = {"model": section_of(read_spec(folder)[0])}
    checkpoint = import_hf(folder, to / "checkpoints")
    if (folder / TOKENIZER_FILE).is_file():
        copy_tokenizer(folder / TOKENIZER_FILE, to)
        said["data"] = {"tokenizer": str(to / TOKENIZER_FILE)}
    else:
        err.print(f"note: {folder} has no {TOKENIZER_FILE}; `weft generate` needs one in {to}")
    head = f"# The model of {dumps(str(folder))}; a file of your own may extend this"
    (to / MODEL_FILE).write_text(f"{head}\n{dump(said)}", encoding="utf-8")
    _tell({"imported": str(checkpoint), "into": str(to)}, json=json)


def _tell(facts: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(facts)
    else:
        out.print("  ".join(f"{key} {value}" for key, value in facts.items()))

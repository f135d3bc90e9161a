"""``weft generate``, ``weft report``, and the folders that commands read from and write."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.output import err, out, print_json
from weft.cli.target import Json
from weft.config.errors import ConfigError, RunError
from weft.config.sections import SampleConfig

if TYPE_CHECKING:
    from weft.checkpoint.place import Place
    from weft.checkpoint.reader import Checkpoint
    from weft.data.tokenizer import Tokenizer
    from weft.models.generate import Writer

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


Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Tokens to write at most.")]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature", min=0.0, help="0 always takes the likeliest token; 1 draws as trained."
    ),
]
TopP = Annotated[float, typer.Option("--top-p", help="Draw from the likeliest tokens of this sum.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Same seed, same text.")]


def refuse_top_p(top_p: float) -> None:
    """A sum of probabilities."""
    if not 0 < top_p <= 1:
        raise ConfigError("--top-p", top_p, "a number > 0 and <= 1")


Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        help="Most memory for weights, such as 2GB: what is beyond is read from the checkpoint "
        "again for each token, layer by layer, the next one while one computes.",
    ),
]
_UNITS = {"MB": 1e6, "GB": 1e9, "MiB": 2**20, "GiB": 2**30}


def memory_bytes(text: str) -> int:
    """What ``--memory`` says.

    Raises:
        ConfigError: it is no size.
    """
    found = re.fullmatch(r"([0-9.]+) ?(MB|GB|MiB|GiB)", text)
    try:
        size = float(found[1]) * _UNITS[found[2]] if found else 0.0
    except ValueError:
        size = 0.0
    if not 0 < size < 2**63:
        raise ConfigError("--memory", text, "a size in MB, GB, MiB or GiB, such as 2GB")
    return int(size)


def open_to_write(folder: str, memory: str | None) -> tuple[Checkpoint, Writer, Tokenizer]:
    """The checkpoint that the user named, its model on the CPU, and the run's tokenizer.

    ``memory``: as ``--memory``; a model that needs no more is loaded as a whole.

    Raises:
        ConfigError, CheckpointError: as ``open_saved``; or that is no size, or too little.
        RunError: the weights are not finite.
    """
    from weft.checkpoint.whole import load_model, load_tokenizer_of
    from weft.train.summary import is_finite

    most_bytes = None if memory is None else memory_bytes(memory)
    checkpoint = open_saved(folder)
    shapes = (checkpoint.shape(name, "param") for name in checkpoint.names("param"))
    if most_bytes is not None and 4 * sum(map(prod, shapes)) > most_bytes:
        if not isinstance(checkpoint.folder, Path):
            expected = "null for a checkpoint far away, or a copy of it on this machine"
            raise ConfigError("--memory", memory, expected)
        from weft.checkpoint.streamed import Streamed

        return checkpoint, Streamed(checkpoint, most_bytes), load_tokenizer_of(checkpoint)
    model, tokenizer = load_model(checkpoint), load_tokenizer_of(checkpoint)
    if not is_finite(model):
        problem = "holds weights that are not finite: its training diverged, so it cannot write"
        raise RunError(f"{checkpoint.folder}: {problem}")
    return checkpoint, model, tokenizer


def generate(
    folder: Folder,
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            "-p",
            help="Text to continue; may be repeated. Without it, what the run continued at its "
            "end: beginnings of held-out text.",
        ),
    ] = None,
    tokens: Tokens = 128,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Continue a prompt with a trained model.

    Example: `weft generate runs/demo-20260101-120000 --prompt "def main("`.
    """
    refuse_top_p(top_p)
    for text in prompt or ():
        if not text:
            raise ConfigError("--prompt", text, "at least one character")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError("--prompt", text, "text in UTF-8") from None
    from weft.train.run_folder import saved_prompts
    from weft.train.summary import write_samples

    checkpoint, model, tokenizer = open_to_write(folder, memory)
    run = checkpoint.run
    prompts = tuple(prompt or (run and saved_prompts(run)) or ("",))
    wanted = SampleConfig(tokens=tokens, temperature=temperature, top_p=top_p)
    wanted = wanted.model_copy(update={"prompts": prompts})  # an empty one begins a document
    samples = write_samples(model, tokenizer, wanted, seed)
    if json:
        print_json({"step": checkpoint.step, "samples": samples})
        return
    for sample in samples:
        out.print(sample["prompt"], style="bold", end="")
        out.print(sample["text"])


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

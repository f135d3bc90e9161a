"""``weft generate``, and what it and ``weft chat`` write with: the model of a run, or of a Hugging
Face folder as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.output import out, print_json
from weft.cli.saved import named_place, open_saved
from weft.cli.target import Json
from weft.config.errors import ConfigError, RunError
from weft.config.sections import SampleConfig
from weft.config.values import MOST_SEED

if TYPE_CHECKING:
    from weft.checkpoint.place import Place
    from weft.checkpoint.whole import Saved
    from weft.data.tokenizer import Tokenizer
    from weft.models.generate import Writer
    from weft.plan.model import ModelSpec

Weights = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER",
        help="A run's folder, its checkpoints folder, or one checkpoint; the address of one: "
        "s3://BUCKET/PREFIX, sftp://[USER@]HOST[:PORT]/PATH; or a Hugging Face folder with "
        "safetensors files.",
    ),
]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Tokens to write at most.")]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature", min=0.0, help="0 always takes the likeliest token; 1 draws as trained."
    ),
]
TopP = Annotated[float, typer.Option("--top-p", help="Draw from the likeliest tokens of this sum.")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=MOST_SEED, help="Same seed, same text.")]


def refuse_draws(temperature: float, top_p: float) -> None:
    """By what nothing can be drawn."""
    if not isfinite(temperature):
        raise ConfigError("--temperature", temperature, "a number >= 0")
    if not 0 < top_p <= 1:
        raise ConfigError("--top-p", top_p, "a number > 0 and <= 1")


Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        help="Most memory for weights, such as 2GB: what is beyond is read from the folder "
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


@dataclass(frozen=True, slots=True)
class Opened:
    """What writes, and where it is from."""

    place: Place
    step: int | None
    """None: no run trained it."""
    run: Path | None
    """The folder of the run that did."""
    model: Writer
    tokenizer: Tokenizer


def open_to_write(folder: str, memory: str | None) -> Opened:
    """The model that the user named, on the CPU.

    ``memory``: as ``--memory``; a model that needs no more is loaded as a whole.

    Raises:
        ConfigError: as ``open_saved``; or that is no size, or too little; or the folder is one of
            Hugging Face that Weft cannot read.
        CheckpointError: as ``open_saved``.
        RunError: the weights are not finite.
    """
    from weft.checkpoint.whole import load_tokenizer_of, saved_model

    most_bytes = None if memory is None else memory_bytes(memory)
    place = named_place(folder)
    if isinstance(place, Path) and _is_hugging_face(place):
        return _open_hugging_face(place, most_bytes)
    checkpoint = open_saved(folder)
    spec, tokenizer = saved_model(checkpoint), load_tokenizer_of(checkpoint)
    _refuse_more_ids(tokenizer, spec, checkpoint.run)
    model = _model(spec, checkpoint, most_bytes)
    return Opened(checkpoint.folder, checkpoint.step, checkpoint.run, model, tokenizer)


def _is_hugging_face(folder: Path) -> bool:
    from weft.models.config_folder import CONFIG_JSON

    return (folder / CONFIG_JSON).is_file()


def _open_hugging_face(folder: Path, most_bytes: int | None) -> Opened:
    from weft.data.cache import TOKENIZER_FILE
    from weft.data.tokenizer import load_tokenizer
    from weft.models.hugging_face_weights import HuggingFaceWeights

    weights = HuggingFaceWeights(folder)
    if not (folder / TOKENIZER_FILE).is_file():
        raise ConfigError("FOLDER", str(folder), f"a {TOKENIZER_FILE} beside the weights")
    tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
    _refuse_more_ids(tokenizer, weights.spec, folder)
    return Opened(folder, None, None, _model(weights.spec, weights, most_bytes), tokenizer)


def _refuse_more_ids(tokenizer: Tokenizer, spec: ModelSpec, folder: Path | None) -> None:
    if tokenizer.vocab_size > spec.vocab_size:
        expected = f"a tokenizer of at most {spec.vocab_size} ids, as the model has"
        hint = f"Looked in {folder}."
        raise ConfigError("tokenizer.json", tokenizer.vocab_size, expected, hint)


def _model(spec: ModelSpec, saved: Saved, most_bytes: int | None) -> Writer:
    """Whole where it has room."""
    from weft.checkpoint.streamed import Streamed
    from weft.checkpoint.whole import load_weights
    from weft.models.registry import param_specs
    from weft.train.summary import is_finite

    if most_bytes is not None and 4 * sum(prod(p.shape) for p in param_specs(spec)) > most_bytes:
        if not isinstance(saved.folder, Path):
            expected = "null for a checkpoint far away, or a copy of it on this machine"
            raise ConfigError("--memory", f"{most_bytes / 1e6:g}MB", expected)
        return Streamed(spec, saved, most_bytes)
    model = load_weights(spec, saved)
    if not is_finite(model):
        problem = "holds weights that are not finite: its training diverged, so it cannot write"
        raise RunError(f"{saved.folder}: {problem}")
    return model


def generate(
    folder: Weights,
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
    refuse_draws(temperature, top_p)
    for text in prompt or ():
        if not text:
            raise ConfigError("--prompt", text, "at least one character")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError("--prompt", text, "text in UTF-8") from None
    from weft.train.run_folder import saved_prompts
    from weft.train.summary import write_samples

    found = open_to_write(folder, memory)
    prompts = tuple(prompt or (found.run and saved_prompts(found.run)) or ("",))
    wanted = SampleConfig(tokens=tokens, temperature=temperature, top_p=top_p)
    wanted = wanted.model_copy(update={"prompts": prompts})  # an empty one begins a document
    samples = write_samples(found.model, found.tokenizer, wanted, seed)
    if json:
        print_json({"step": found.step, "samples": samples})
        return
    for sample in samples:
        out.print(sample["prompt"], style="bold", end="")
        out.print(sample["text"])

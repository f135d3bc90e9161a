"""``weft generate``: text from a trained run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.output import err, out, print_json
from weft.cli.target import Json
from weft.config.errors import ConfigError
from weft.config.sections import SampleConfig


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("generate")(generate)


def generate(
    where: Annotated[Path, typer.Argument(help="A run's folder, or one of its checkpoints.")],
    *,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Text to continue; may be repeated.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 always takes the likeliest token.")
    ] = 0.8,
    top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest tokens of this sum.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same text.")] = 0,
    json: Json = False,
) -> None:
    """Continue a prompt with a trained model.

    Example: `weft generate runs/demo-20260101-120000 --prompt "def main("`.
    """
    if not 0 < top_p <= 1:
        raise ConfigError("--top-p", top_p, "a number > 0 and <= 1")
    if not where.is_dir():
        raise ConfigError("generate", str(where), "a run's folder or a checkpoint that exists")
    from weft.checkpoint.reader import open_checkpoint
    from weft.checkpoint.whole import load_model, load_tokenizer_of
    from weft.train.summary import write_samples

    checkpoint = open_checkpoint(where)
    for note in checkpoint.notes:
        err.print(f"note: {note}", markup=False)
    model, tokenizer = load_model(checkpoint), load_tokenizer_of(checkpoint)
    wanted = SampleConfig(
        prompts=tuple(prompt or ("def ",)), tokens=tokens, temperature=temperature, top_p=top_p
    )
    samples = write_samples(model, tokenizer, wanted, seed)
    if json:
        print_json({"step": checkpoint.step, "samples": samples})
        return
    for sample in samples:
        out.print(sample["prompt"], style="bold", markup=False, end="")
        out.print(sample["text"], markup=False)

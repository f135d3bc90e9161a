"""``weft generate``: text from a trained run."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.cli.output import out, print_json
from weft.cli.saved import Folder, open_saved
from weft.cli.target import Json
from weft.config.errors import ConfigError, RunError
from weft.config.sections import SampleConfig


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("generate")(generate)


def generate(
    folder: Folder,
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
    prompts = tuple(prompt or ("def ",))
    for text in prompts:
        _refuse_unusable(text)
    from weft.checkpoint.whole import load_model, load_tokenizer_of
    from weft.train.summary import is_finite, write_samples

    checkpoint = open_saved(folder)
    model, tokenizer = load_model(checkpoint), load_tokenizer_of(checkpoint)
    if not is_finite(model):
        problem = "holds weights that are not finite: its training diverged, so it cannot write"
        raise RunError(f"{checkpoint.folder}: {problem}")
    wanted = SampleConfig(prompts=prompts, tokens=tokens, temperature=temperature, top_p=top_p)
    samples = write_samples(model, tokenizer, wanted, seed)
    if json:
        print_json({"step": checkpoint.step, "samples": samples})
        return
    for sample in samples:
        out.print(sample["prompt"], style="bold", markup=False, end="")
        out.print(sample["text"], markup=False)


def _refuse_unusable(prompt: str) -> None:
    if not prompt:
        raise ConfigError("--prompt", prompt, "at least one character")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ConfigError("--prompt", prompt, "text in UTF-8") from None

"""``weft chat``: write with a trained model, line by line, and see each token as it comes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from weft.cli.generate import (
    Memory,
    Seed,
    Temperature,
    Tokens,
    TopP,
    Weights,
    open_to_write,
    refuse_draws,
)
from weft.cli.output import err

if TYPE_CHECKING:
    from weft.data.tokenizer import Tokenizer

NEW, QUIT = "/new", "/quit"
HINT = f"Each line is continued. Empty: go on; {NEW}: forget what was said; {QUIT} or Ctrl-D: end."
LOST = "\ufffd"
"""A character of which a token held only a part, so far."""


def chat(
    folder: Weights,
    *,
    tokens: Tokens = 128,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    memory: Memory = None,
) -> None:
    """Type lines, and read how a trained model goes on, token by token.

    The model reads everything since the last `/new`, as far back as it can look. It continues
    text; it was not taught to answer. Lines may also come from a file or a pipe:
    `echo "Once upon a time" | weft chat runs/mine`.
    """
    refuse_draws(temperature, top_p)
    found = open_to_write(folder, memory)
    tokenizer = found.tokenizer
    import torch

    from weft.models.generate import Sampling, stream
    from weft.train.summary import prompt_tokens

    is_terminal = sys.stdin.isatty()
    if is_terminal:
        step = "" if found.step is None else f", step {found.step}"
        err.print(f"{found.place}{step}. {HINT}", style="dim")
    sampling = Sampling(
        max_new_tokens=tokens, temperature=temperature, top_p=top_p, end_id=tokenizer.end_id
    )
    said = ""
    for turn, line in enumerate(_typed() if is_terminal else _read()):
        if line.strip() == QUIT:
            return
        if line.strip() == NEW:
            said = ""
            continue
        said += f"\n{line}" if said and line else line
        new = stream(
            found.model,
            torch.tensor(prompt_tokens(tokenizer, said)).long()[None],
            replace(sampling, seed=seed + turn),
        )
        reply, is_over = _show(tokenizer, (int(token) for token in new), stoppable=is_terminal)
        said = "" if is_over else said + reply


def _typed() -> Iterator[str]:
    """What is typed, until the end of input."""
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return


def _read() -> Iterator[str]:
    """The lines of a file or a pipe; what is not UTF-8 in them becomes U+FFFD."""
    for line in sys.stdin.buffer:
        yield line.decode(errors="replace").rstrip("\r\n")


def _show(tokenizer: Tokenizer, new: Iterable[int], *, stoppable: bool) -> tuple[str, bool]:
    """Print tokens as they come: (their text, whether they end a document)."""
    ids: list[int] = []
    shown, is_over = "", False
    try:
        for token in new:
            is_over = token == tokenizer.end_id
            if not is_over:
                ids.append(token)
                text = tokenizer.decode(ids).rstrip(LOST)  # more of that character may come
                typer.echo(text[len(shown) :], nl=False)
                shown = text
    except KeyboardInterrupt:
        if not stoppable:
            raise
    typer.echo()
    return tokenizer.decode(ids), is_over

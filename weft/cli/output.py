"""How commands speak: text for people on standard output, or one JSON object and nothing else."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

out = Console(soft_wrap=True, highlight=False, emoji=False, markup=False)
"""Results."""
err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False, markup=False)
"""Errors and warnings; everything, when the result is JSON."""

COLUMNS: dict[str, Any] = {"box": None, "pad_edge": False}
"""Looks of a table without lines."""


def print_json(value: Mapping[str, Any]) -> None:
    """The one object that ``--json`` promises. All its numbers must be finite."""
    typer.echo(json.dumps(value, indent=2, default=str, allow_nan=False))


def print_table(
    headers: Iterable[str],
    rows: Iterable[Iterable[str]],
    *,
    right: Collection[str] = (),
    **looks: Any,
) -> None:
    """A table of ``rich``; the columns in ``right`` line up there.

    No name is cut: a terminal's lines fold, and a file or a pipe has lines as wide as they are.
    """
    table = Table(**looks)
    for header in headers:
        side: Literal["left", "right"] = "right" if header in right else "left"
        table.add_column(header, justify=side, overflow="fold")
    for row in rows:
        table.add_row(*row)
    if not out.is_terminal:
        boundless = out.options.update(max_width=sys.maxsize)
        table.width = Measurement.get(out, boundless, table).maximum
    out.print(table)


def aligned(rows: Sequence[Sequence[str]], *, words: int) -> Iterator[str]:
    """A line for each row, as wide as it is; columns after the first ``words`` are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = "<" * words + ">" * (len(widths) - words)
    for row in rows:
        cells = zip(row, sides, widths, strict=True)
        yield "  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip()


def say(text: str) -> None:
    """One sentence, as ``warn``."""
    warn([text])


def warn(texts: Iterable[str]) -> None:
    """What nobody should miss, whatever else is printed or not."""
    for text in texts:
        err.print(f"warning: {text}", style="yellow")


def print_anything() -> None:
    """Let no character end a command: one that the terminal's encoding lacks shows as "?"."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def finish(code: int) -> None:
    """End the command with this exit code."""
    if code:
        raise typer.Exit(code)

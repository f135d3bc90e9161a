"""How commands speak: text for people on standard output, or one JSON object and nothing else."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console

out = Console(soft_wrap=True, highlight=False, emoji=False)
"""Results."""
err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
"""Errors and warnings; everything, when the result is JSON."""


def print_json(value: Mapping[str, Any]) -> None:
    """The one object that ``--json`` promises. All its numbers must be finite."""
    typer.echo(json.dumps(value, indent=2, default=str, allow_nan=False))


def print_anything() -> None:
    """Let no character end a command: one that the terminal's encoding lacks shows as "?"."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def finish(code: int) -> None:
    """End the command with this exit code."""
    if code:
        raise typer.Exit(code)


def gib(num_bytes: float) -> str:
    """Bytes for people: ``3.2 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def count(number: float) -> str:
    """Large numbers for people: ``6.5 M``."""
    for unit in ("", " k", " M", " B"):
        if abs(number) < 1000:
            return f"{number:.0f}" if not unit else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f} T"

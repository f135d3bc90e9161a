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

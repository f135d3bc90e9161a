"""The last lines of ``weft train``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.cli.output import out


def print_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Held-out loss beside what counting words reaches, samples, and where everything lies."""
    held_out, baselines = summary["held_out"], summary["baselines"]
    out.print()
    out.print(
        f"[bold]held-out loss {held_out['loss']:.4f}[/] nats a token: perplexity "
        f"{held_out['perplexity']:.2f}, {held_out['bits_per_byte']:.3f} bits a byte"
    )
    for name, loss in baselines.items():
        out.print(f"  a {name} model reaches {loss:.4f}")
    for sample in summary["samples"]:
        out.print("[dim]" + "─" * 60 + "[/]")
        out.print(sample["prompt"], style="bold", markup=False, end="")
        out.print(sample["text"], markup=False)
    out.print()
    out.print(f"report:     {folder / 'report.html'}", markup=False)
    out.print(f"checkpoint: {folder / 'checkpoints'}", markup=False)
    out.print(f"go on with: weft generate {folder} --prompt 'def '", markup=False)

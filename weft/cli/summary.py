"""The last lines of ``weft train``: what it came to, and with ``--comm-report`` what it sent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from weft.cli.output import out
from weft.report.prediction_rows import HEADERS, prediction_note, prediction_rows
from weft.train.job import TRAFFIC_FILE


def print_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Held-out loss beside those of the baselines, samples, and the paths of what was written."""
    out.print()
    for line in _held_out(summary["held_out"], summary["baselines"]):
        out.print(line)
    for sample in summary["samples"]:
        out.print("[dim]" + "─" * 60 + "[/]")
        out.print(sample["prompt"], style="bold", markup=False, end="")
        out.print(sample["text"], markup=False)
    _print_prediction(summary)
    out.print()
    out.print(f"report:     {folder / 'report.html'}", markup=False)
    out.print(f"checkpoint: {folder / 'checkpoints'}", markup=False)
    out.print(f"go on with: weft generate {folder} --prompt 'def '", markup=False)


def _print_prediction(summary: Mapping[str, Any]) -> None:
    """What a step was expected to take beside what it took."""
    out.print()
    if rows := prediction_rows(summary):
        table = Table(box=None, pad_edge=False)
        for number, header in enumerate(HEADERS):
            table.add_column(header, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        out.print(table)
    if note := prediction_note(summary):
        out.print(note, style="dim", markup=False)


def _held_out(found: Mapping[str, Any] | None, baselines: Mapping[str, float]) -> Iterator[str]:
    if found is None:
        yield "no held-out text to judge the model by (data.held_out is 0)"
        return
    if found["loss"] is None:
        yield "[red]the held-out loss is not a finite number: training diverged[/]"
    else:
        perplexity = found["perplexity"]
        yield (
            f"[bold]held-out loss {found['loss']:.4f}[/] nats a token: perplexity "
            f"{'beyond all numbers' if perplexity is None else f'{perplexity:.2f}'}, "
            f"{found['bits_per_byte']:.3f} bits a byte"
        )
    for name, loss in baselines.items():
        yield f"  a {name} model reaches {loss:.4f}"


def print_traffic(folder: Path) -> None:
    """What a step sent, added up over ranks; calls and peers of the rank that has most."""
    record = json.loads((folder / TRAFFIC_FILE).read_text())
    table = Table(title="sent in one step", title_justify="left", box=None, pad_edge=False)
    table.add_column("collective")
    table.add_column("link")
    for column in ("calls", "messages", "MB", "peers"):
        table.add_column(column, justify="right")
    for name, link in sorted({(row["name"], row["link"]) for row in record["per_step"]}):
        rows = [row for row in record["per_step"] if (row["name"], row["link"]) == (name, link)]
        table.add_row(name, link, *_figures(rows))
    out.print()
    out.print(table)


def _figures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    megabytes = sum(row["bytes"] for row in rows) / 1e6
    calls = max(row["calls"] for row in rows)
    messages = sum(row["messages"] for row in rows)
    peers = max(len(row["peers"]) for row in rows)
    return [f"{calls:g}", f"{messages:g}", f"{megabytes:.3f}", str(peers)]

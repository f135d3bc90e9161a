"""The table of ``weft train --comm-report``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from weft.cli.output import out
from weft.train.job import TRAFFIC_FILE


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

"""Who waits in a step, how long and for what, as rows: for the end of a run and its page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.report.run_files import at
from weft.report.units import percent_or_na, seconds

HEADERS = ("Rank", "Pipeline", "Stages", "Waits in a step", "Part of it", "For what")
NUMBERS = HEADERS[:5]
MOST_RANKS = 16
"""Those that wait longest."""
MOST_NAMED = 3


def wait_rows(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Of a run's ``summary.json``; empty where nobody waits, or it is not known."""
    found = at(summary, "waits")
    ranks = found if isinstance(found, list) else []
    longest = sorted(ranks, key=lambda rank: -sum(rank["waits_s"].values()))[:MOST_RANKS]
    return [_row(rank) for rank in sorted(longest, key=lambda rank: rank["rank"])]


def _row(rank: Mapping[str, Any]) -> tuple[str, ...]:
    waits, step_s = rank["waits_s"], rank["step_s"]
    total = sum(waits.values())
    most = sorted(waits, key=waits.__getitem__, reverse=True)[:MOST_NAMED]
    return (
        str(rank["rank"]),
        str(rank["pipeline"]),
        ", ".join(map(str, rank["stages"])),
        seconds(total),
        percent_or_na(total / step_s if step_s else None),
        ", ".join(f"{name} {seconds(waits[name])}" for name in most),
    )

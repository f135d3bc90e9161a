"""Predicted against measured, as rows of text: for the end of a run and for its page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.report.run_files import at, number

HEADERS = ("One step", "Predicted", "Measured", "Predicted / measured")
_SIDES = ("predicted", "measured")


def prediction_rows(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """What both are known of, or one; of a run's ``summary.json``. Empty for one without either."""
    step_s, tokens_per_s, sent_mb = (
        tuple(number(summary, "prediction", side, key) for side in _SIDES)
        for key in ("step_time_s", "tokens_per_s", "sent_mb")
    )
    rank, memory_gib = _fullest(summary)
    known = (
        ("Step time", step_s, "s"),
        ("Tokens per second", tokens_per_s, ""),
        (f"Memory of rank {rank}", memory_gib, "GiB"),
        ("Sent by all ranks", sent_mb, "MB"),
    )
    return [
        (
            what,
            _text(predicted, unit),
            _text(measured, unit),
            "" if predicted is None or not measured else f"{predicted / measured:.3f}",
        )
        for what, (predicted, measured), unit in known
        if predicted is not None or measured is not None
    ]


def prediction_note(summary: Mapping[str, Any]) -> str:
    """What the prediction rests on, or why there is no time in it."""
    if problem := at(summary, "prediction", "problem"):
        return f"No time was predicted: {problem}."
    basis = at(summary, "prediction", "basis")
    known = isinstance(basis, list) and basis
    return f"Predicted from {'; '.join(map(str, basis))}." if known else ""


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "not known"
    digits = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{digits} {unit}".strip()


def _fullest(summary: Mapping[str, Any]) -> tuple[int, tuple[float | None, ...]]:
    """The rank that holds most, measured where that is known; what it holds on both sides."""
    found = (at(summary, "prediction", side, "memory_gib") for side in _SIDES)
    predicted, measured = (
        [float(v) for v in values if isinstance(v, int | float)] if isinstance(values, list) else []
        for values in found
    )
    told = measured or predicted
    rank = max(range(len(told)), key=told.__getitem__, default=0)
    return rank, tuple(v[rank] if rank < len(v) else None for v in (predicted, measured))

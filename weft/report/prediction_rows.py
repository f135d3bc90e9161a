"""Predicted against measured, as rows of text: for the end of a run and for its page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.report.run_files import number

HEADERS = ("One step", "Predicted", "Measured", "Predicted / measured")
_UNKNOWN = "not known"


def prediction_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """What both are known of, or one; of a run's ``summary.json``. Empty for one without either."""
    return [row for row in _rows(summary) if row[1:3] != (_UNKNOWN, _UNKNOWN)]


def prediction_note(summary: Mapping[str, Any]) -> str:
    """What the prediction rests on, or why there is no time in it."""
    found = summary.get("prediction")
    if not isinstance(found, Mapping):
        return ""
    if found.get("problem"):
        return f"No time was predicted: {found['problem']}."
    basis = found.get("basis")
    return (
        f"Predicted from {'; '.join(map(str, basis))}." if isinstance(basis, list) and basis else ""
    )


def _rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for what, key, unit in (
        ("Step time", "step_time_s", "s"),
        ("Tokens per second", "tokens_per_s", ""),
    ):
        sides = [number(summary, "prediction", side, key) for side in ("predicted", "measured")]
        yield _row(what, sides[0], sides[1], unit)
    rank, predicted, measured = _fullest(summary)
    yield _row(f"Memory of rank {rank}", predicted, measured, "GiB")
    sides = [number(summary, "prediction", side, "sent_mb") for side in ("predicted", "measured")]
    yield _row("Sent by all ranks", sides[0], sides[1], "MB")


def _row(
    what: str, predicted: float | None, measured: float | None, unit: str
) -> tuple[str, str, str, str]:
    ratio = "" if predicted is None or not measured else f"{predicted / measured:.3f}"
    return what, _text(predicted, unit), _text(measured, unit), ratio


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return _UNKNOWN
    digits = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{digits} {unit}".strip()


def _fullest(summary: Mapping[str, Any]) -> tuple[int, float | None, float | None]:
    """The rank that holds most, measured where that is known."""
    lists = [_numbers(summary, side) for side in ("measured", "predicted")]
    told = next(filter(None, lists), [])
    rank = max(range(len(told)), key=told.__getitem__, default=0)
    measured, predicted = (each[rank] if rank < len(each) else None for each in lists)
    return rank, predicted, measured


def _numbers(summary: Mapping[str, Any], side: str) -> list[float]:
    found = summary.get("prediction")
    part = found.get(side) if isinstance(found, Mapping) else None
    values = part.get("memory_gib") if isinstance(part, Mapping) else None
    if not isinstance(values, list):
        return []
    return [float(v) for v in values if isinstance(v, int | float)]

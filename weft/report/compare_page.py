"""A comparison of two runs for people: lines of text, tables, one object, and a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from typing import Any

from weft.report.charts import thin
from weft.report.compare_runs import Comparison, EvalSummary, StepPair
from weft.report.html import Table, render

WIDTH, HEIGHT = 800, 240
_MARGIN = 1.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """Differences over steps inside their band; coordinates as SVG writes them."""

    width: int
    height: int
    middle: float
    band: str
    lines: Sequence[str]
    top: str
    """Nats at the upper edge; the lower edge is as far below zero."""
    steps: str


def verdict(found: Comparison) -> str:
    """Inside or outside, in one sentence."""
    if found.unlike_data:
        return (
            f"OTHER DATA: {len(found.unlike_data)} steps read other samples, "
            f"the first is step {found.unlike_data[0]}"
        )
    outside = found.first_outside
    if outside is not None:
        return (
            f"OUTSIDE: step {outside.step} differs by {outside.difference:+.2e} nats, "
            f"and rounding in {found.precision} explains {outside.band:.2e}"
        )
    largest = max(abs(pair.difference) / pair.band for pair in found.pairs)
    return f"inside the band at every step, at most {largest:.0%} of it"


def lines(found: Comparison) -> list[str]:
    """What stands above the tables."""
    first, last = found.pairs[0].step, found.pairs[-1].step
    said = [f"{len(found.pairs)} steps in common, {first} to {last}, {found.precision}"]
    if found.unlike_data is None:
        said.append("data: not recorded by both runs")
    elif not found.unlike_data:
        said.append("data: the same samples in the same order at every step")
    trend = found.trend
    if trend is not None:
        side = f"{trend.above} of {trend.blocks} blocks of steps above zero"
        drift = "in one direction" if trend.drifts else "none"
        said.append(
            f"trend: {drift} ({side}, chance {trend.chance:.2g}), {trend.slope:+.1e} a step"
        )
        if trend.exponent is not None:
            said.append(
                f"growth: like step^{trend.exponent:.2f} (0 constant, 0.5 a random walk, 1 a drift)"
            )
    return [*said, verdict(found)]


def tables(found: Comparison) -> list[Table]:
    """Evaluations, and what was set otherwise; only those with something in them."""
    changes = {
        "Settings that differ": found.config,
        "Plans": found.plan,
        "Environments": found.environment,
    }
    headers = ("What", "A", "B")
    result = [Table(caption=what, headers=headers, rows=rows) for what, rows in changes.items()]
    evals = [] if found.evals is None else [_evaluations(found.evals, found.noise)]
    return evals + [table for table in result if table.rows]


def _evaluations(evals: EvalSummary, noise: EvalSummary | None) -> Table:
    found = zip(evals.steps, evals.differences, evals.percent, strict=True)
    rows = [
        (f"step {step}", f"{difference:+.3e}", "unknown" if share is None else f"{share:+.3e}")
        for step, difference, share in found
    ]
    for name, summary in (("", evals), ("noise of a seed: ", noise)):
        if summary is not None:
            rows += [
                (f"{name}mean", f"{summary.mean:+.3e}", ""),
                (f"{name}mean of absolute values", f"{summary.mean_absolute:.3e}", ""),
                (f"{name}largest", f"{summary.largest:+.3e}", ""),
            ]
    headers = ("After", "nats", "%")
    return Table(caption="Held-out loss, B minus A", headers=headers, rows=rows, numeric=True)


def to_json(found: Comparison) -> dict[str, Any]:
    """The comparison as one object; what is not a number is null."""
    return {
        "a": str(found.a),
        "b": str(found.b),
        "inside": found.ok,
        "verdict": verdict(found),
        "precision": found.precision,
        "steps": [_step(pair) for pair in found.pairs],
        "trend": found.trend and asdict(found.trend),
        "evaluations": found.evals and asdict(found.evals),
        "noise": found.noise and asdict(found.noise),
        "same_data": None if found.unlike_data is None else not found.unlike_data,
        "config": found.config,
        "plan": found.plan,
        "environment": found.environment,
    }


def _step(pair: StepPair) -> dict[str, Any]:
    numbers = {"a": pair.a, "b": pair.b, "difference": pair.difference, "band": pair.band}
    finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    return {"step": pair.step, **finite, "inside": pair.is_inside}


def page(found: Comparison) -> str:
    """One HTML page with a picture, that opens anywhere."""
    return render(
        "compare.html.j2",
        title=f"{found.a.name} and {found.b.name}",
        ok=found.ok,
        verdict=verdict(found),
        caption=f"B minus A, nats, and the band that rounding in {found.precision} explains",
        picture=picture(found.pairs),
        tables=tables(found),
    )


def picture(pairs: Sequence[StepPair]) -> Picture:
    """The differences as a line, broken where there is no number; the band as an area."""
    steps = [pair.step for pair in pairs]
    at, differences = thin(steps, [pair.difference for pair in pairs], partial(max, key=abs))
    _, bands = thin(steps, [pair.band for pair in pairs], max)
    known = [abs(y) for y in (*differences, *bands) if y is not None]
    top = _MARGIN * max(known, default=0.0) or 1.0
    span = max(at[-1] - at[0], 1)

    def point(step: int, value: float) -> str:
        x = (step - at[0]) / span * WIDTH
        return f"{x:.1f},{HEIGHT / 2 * (1 - value / top):.1f}"

    edges = [(s, y) for s, y in zip(at, bands, strict=True) if y is not None]
    outline = [*edges, *((s, -y) for s, y in reversed(edges))]
    pieces = groupby(zip(at, differences, strict=True), key=lambda item: item[1] is None)
    return Picture(
        width=WIDTH,
        height=HEIGHT,
        middle=HEIGHT / 2,
        band=" ".join(point(s, y) for s, y in outline),
        lines=[
            " ".join(point(step, y) for step, y in piece if y is not None)
            for is_gap, piece in pieces
            if not is_gap
        ],
        top=f"{top:.1e}",
        steps=f"steps {at[0]} to {at[-1]}",
    )

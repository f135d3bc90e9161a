"""A comparison of two runs for people: lines of text, tables, one object, and a page."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import Any

from weft.report.charts import thin
from weft.report.compare_runs import Comparison, EvalSummary, StepPair
from weft.report.html import Table, render
from weft.report.svg import Axis, Chart, Series, line_chart


def verdict(found: Comparison) -> str:
    """Inside or outside, in one sentence."""
    if found.unlike_data:
        return (
            f"OTHER DATA: {len(found.unlike_data)} steps read other samples, "
            f"the first is step {found.unlike_data[0]}"
        )
    outside = found.first_outside
    if outside is not None and (diverged := _diverged(outside)):
        return diverged
    if outside is not None:
        return (
            f"OUTSIDE: step {outside.step} differs by {outside.difference:+.2e} nats, "
            f"and rounding in {found.precision} explains {outside.band:.2e}"
        )
    largest = max(pair.part for pair in found.pairs)
    return f"inside the band at every step, at most {largest:.0%} of it"


def _diverged(pair: StepPair) -> str:
    """Whose loss is no number; empty: nobody's."""
    names = [name for name, loss in (("A", pair.a), ("B", pair.b)) if not math.isfinite(loss)]
    if not names:
        return ""
    has = "has" if len(names) == 1 else "have"
    return f"DIVERGED: {' and '.join(names)} {has} no finite loss at step {pair.step}"


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
    """One HTML page with pictures, that opens anywhere."""
    drawn = (difference_chart(found), loss_chart(found))
    return render(
        "compare.html.j2",
        title=f"{found.a.name} and {found.b.name}",
        kind="comparison",
        status=(found.ok, verdict(found)),
        said=lines(found)[:-1],
        figures=[(chart, line_chart(chart)) for chart in drawn],
        tables=tables(found),
    )


def difference_chart(found: Comparison) -> Chart:
    """The differences as a line, broken where there is no number; the band as an area."""
    steps = [pair.step for pair in found.pairs]
    at, differences = thin(steps, [p.difference for p in found.pairs], partial(max, key=abs))
    _, bands = thin(steps, [pair.band for pair in found.pairs], max)
    outside = found.first_outside
    return Chart(
        id="difference",
        title="Difference of losses, B minus A",
        series=[
            Series(label=f"the band of rounding in {found.precision}", x=at, y=bands, look="band"),
            Series(label="B minus A", x=at, y=differences),
        ],
        description=f"B minus A over the step: {verdict(found)}.",
        y=Axis("difference", "nats per token"),
        marks=[] if outside is None else [(outside.step, "first outside")],
        height=240,
    )


def loss_chart(found: Comparison) -> Chart:
    """Both losses."""
    steps = [pair.step for pair in found.pairs]
    at, a = thin(steps, [pair.a for pair in found.pairs], fmean)
    _, b = thin(steps, [pair.b for pair in found.pairs], fmean)
    return Chart(
        id="losses",
        title="Losses of training",
        series=[
            Series(label=f"A: {found.a.name}", x=at, y=a),
            Series(label=f"B: {found.b.name}", x=at, y=b, look="second"),
        ],
        description="The losses of both runs over the step.",
        y=Axis("loss", "nats per token"),
        height=240,
    )

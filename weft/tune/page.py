"""What a tuning shows: tables for a terminal, one JSON object, and a page with the curve of the
best so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from weft.report.html import Table, Tile, render
from weft.report.svg import Axis, Bar, Chart, Row, Scale, Series, fill_legend, line_chart, row_chart
from weft.tune.tuner import Outcome, Tuner
from weft.tune.tuning import Result

PAGE = "tune.html"
"""In the folder."""
NUMBERS = (
    "trial",
    "predicted",
    "measured",
    "of the best",
    "+-",
    "memory",
    "times",
    "most",
    "least",
)
_STEP = Axis("step", "s")
_PREDICTED, _MEASURED, _BEST = "fill-8", "fill-0", "fill-1"


def trial_rows(result: Result) -> list[dict[str, str]]:
    """Every trial, in order."""
    tuner, fates = result.tuner, result.tuner.fates()
    found = []
    for number, outcome in enumerate(tuner.outcomes, start=1):
        candidate = tuner.candidates[outcome.candidate]
        row = {"trial": str(number), "plan": candidate.name}
        row |= {"predicted": f"{candidate.predicted_s:.4g} s"}
        if outcome.step_s is None:
            row |= dict.fromkeys(("measured", "of the best", "+-", "memory"), "")
        else:
            row |= {
                "measured": f"{outcome.step_s:.4g} s",
                "of the best": f"{outcome.step_s / tuner.best_s:.3f}",
                "+-": "" if outcome.against is None else f"{outcome.within:.1%}",
                "memory": f"{outcome.memory_gib:.2f} GiB",
            }
        found.append(row | {"what became of it": fates[outcome.candidate].why})
    return found


def verdict(result: Result) -> str:
    """The best plan, and how sure that is."""
    tuner = result.tuner
    name = tuner.candidates[result.best].name
    said = f"{tuner.name(result.best)}: {name}"
    first = tuner.ran[0].candidate
    whose = "the planner's first choice" + " of those that ran" * (first > 0)
    whose = "your own plan" if tuner.candidates[first].is_given else whose
    if first == result.best:
        return f"{said}, which was {whose}"
    if result.gain is None:
        return said
    gain = result.gain
    sure = "" if gain.times - 1 > gain.within * gain.times else ", which may be noise"
    times = f"{gain.times:.3f} +- {gain.within * gain.times:.3f}"
    return f"{said}: {whose} takes {times} times as long{sure}"


def as_json(result: Result) -> dict[str, Any]:
    """What ``weft tune --json`` prints."""
    tuner, fates = result.tuner, result.tuner.fates()
    gain = result.gain
    return {
        "best": {
            "name": tuner.candidates[result.best].name,
            "plan": tuner.candidates[result.best].as_json()["plan"],
            "step_s": tuner.best_s,
        },
        "first": tuner.candidates[tuner.ran[0].candidate].name,
        "first_is_given": tuner.candidates[tuner.ran[0].candidate].is_given,
        "gain": None if gain is None else gain.times,
        "gain_within": None if gain is None else gain.within * gain.times,
        "why": result.why,
        "used_s": result.used_s,
        "trials": [_trial_json(tuner, outcome) for outcome in tuner.outcomes],
        "final": [_trial_json(tuner, outcome) for outcome in result.final],
        "plans": [
            {
                "name": each.name,
                "predicted_s": each.predicted_s,
                "kept": fates[number].kept,
                "why": fates[number].why,
            }
            for number, each in enumerate(tuner.candidates)
        ],
        "lessons": [
            {"about": each.about, "times": each.times, "within": each.within}
            for each in tuner.lessons()
        ],
        "memory": {name: each.times for name, each in tuner.memory().items()},
    }


def _trial_json(tuner: Tuner, outcome: Outcome) -> dict[str, Any]:
    candidate = tuner.candidates[outcome.candidate]
    return {
        "name": candidate.name,
        "predicted_s": candidate.predicted_s,
        "step_s": outcome.step_s,
        "times": outcome.times,
        "within": outcome.within,
        "tokens_per_s": list(outcome.values),
        "memory_gib": outcome.memory_gib,
        "problem": outcome.problem,
        "cost_s": outcome.cost_s,
    }


def page(result: Result) -> str:
    """One self-contained HTML page."""
    tuner = result.tuner
    curve = _curve(tuner)
    lessons = [(each.about, f"{each.times:.3f}", f"{each.within:.0%}") for each in tuner.lessons()]
    memory = [
        (name, f"{each.times:.2f}", f"{each.least:.2f}" if each.least else "")
        for name, each in tuner.memory().items()
    ]
    return render(
        "tune.html.j2",
        title="Tuning",
        kind="tune",
        tiles=list(_tiles(result)),
        verdict=verdict(result) + (f". It ended: {result.why}." if result.why else "."),
        curve=curve,
        drawn=line_chart(curve),
        rows=row_chart(_rows(tuner), _STEP, _longest(tuner)),
        legend=fill_legend(
            [(_PREDICTED, "predicted"), (_MEASURED, "measured"), (_BEST, "measured, the best")]
        ),
        trials=_table("Every trial", trial_rows(result)),
        lessons=Table(
            caption="As long as predicted",
            headers=("of", "times", "+-"),
            rows=lessons,
            numeric=NUMBERS,
        ),
        memory=Table(
            caption="Memory, as much as predicted",
            headers=("on", "times", "least"),
            rows=memory,
            numeric=NUMBERS,
        ),
        plans=_table("Plans", _plan_rows(tuner)),
    )


def _tiles(result: Result) -> Iterator[Tile]:
    tuner, gain = result.tuner, result.gain
    yield Tile("Best step", f"{tuner.best_s:.4g} s", tuner.candidates[result.best].name)
    if gain is not None:
        about = f"{gain.times:.3f} \N{PLUS-MINUS SIGN} {gain.within * gain.times:.3f}"
        yield Tile("Faster than the first", about, "times, 95 % interval, in turns")
    yield Tile("Trials", str(len(tuner.outcomes)), f"of {len(tuner.candidates)} unlike plans")
    yield Tile("Time", f"{result.used_s:.0f} s", f"{tuner.cost_s:.0f} s a trial")


def _curve(tuner: Tuner) -> Chart:
    steps = [outcome.step_s for outcome in tuner.outcomes]
    infinite = float("inf")
    best = list(accumulate((infinite if s is None else s for s in steps), min))
    first = next(s for s in best if s < infinite)
    x = list(range(1, len(steps) + 1))
    predicted: list[float | None] = [
        tuner.candidates[outcome.candidate].predicted_s for outcome in tuner.outcomes
    ]
    return Chart(
        id="best",
        title="Best so far",
        series=[
            Series(label="best so far", x=x, y=[None if b == infinite else b for b in best]),
            Series(label="measured", x=x, y=list(steps), look="points"),
            Series(label="predicted", x=x, y=predicted, look="second"),
        ],
        description=f"{first:.4g} s a step at first, {best[-1]:.4g} s after {len(x)} trials.",
        y=_STEP,
        x=Axis("trial"),
        from_zero=True,
        height=300,
    )


def _longest(tuner: Tuner) -> float:
    both = [tuner.candidates[o.candidate].predicted_s for o in tuner.outcomes]
    return 1.02 * max(both + [o.step_s for o in tuner.outcomes if o.step_s is not None])


def _rows(tuner: Tuner) -> Iterator[Row]:
    scale = Scale.of(_longest(tuner), _STEP.unit)
    for number, outcome in enumerate(tuner.outcomes, start=1):
        candidate = tuner.candidates[outcome.candidate]
        pairs: list[tuple[str, float | None, str]] = [
            (f"{number} predicted: {candidate.name}", candidate.predicted_s, _PREDICTED),
            (
                f"{number} measured",
                outcome.step_s,
                _BEST if outcome.candidate == tuner.best else _MEASURED,
            ),
        ]
        for label, seconds, look in pairs:
            text = outcome.problem if seconds is None else scale.text(seconds)
            yield Row(label, [Bar(0.0, seconds or 0.0, look, text, text)])


def _plan_rows(tuner: Tuner) -> list[dict[str, str]]:
    fates = tuner.fates()
    return [
        {
            "plan": each.name,
            "predicted": f"{each.predicted_s:.4g} s",
            "what became of it": fates[number].why,
        }
        for number, each in enumerate(tuner.candidates)
    ]


def _table(caption: str, rows: Sequence[Mapping[str, str]]) -> Table:
    headers = tuple(dict.fromkeys(name for row in rows for name in row))
    cells = [tuple(row.get(name, "") for name in headers) for row in rows]
    return Table(caption=caption, headers=headers, rows=cells, numeric=NUMBERS)

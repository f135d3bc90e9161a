"""How many tokens went to each expert of each layer, for the page of a run: a map, and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from weft.report.html import Table
from weft.report.metrics import StepMetrics
from weft.report.svg import Axis, Bar, Row, fill_legend, row_chart

LAST = 10
"""Of the steps that tell, so many at the end are added up."""
HEATS = (0.25, 0.75, 1.25, 1.75)
"""Of the mean, where one shade ends and the next begins."""
EXPERT = Axis("expert")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsPart:
    """The picture and the table of one section."""

    title: str
    map: Markup
    legend: Markup
    table: Table


def experts_part(steps: Sequence[StepMetrics]) -> ExpertsPart | None:
    """Of a run's steps; None where no step says anything of experts."""
    told = [(step.step, found) for step in steps if (found := step.tokens_per_expert)][-LAST:]
    if not told:
        return None
    last = told[-1][1]
    loads = {
        layer: [sum(each) for each in zip(*(found[layer] for _, found in told), strict=True)]
        for layer in last
    }
    most = max(map(len, loads.values()))
    words = [f"below {HEATS[0]:g} of the mean", *(f"from {heat:g}" for heat in HEATS)]
    return ExpertsPart(
        title=f"Tokens that went to each expert, by layer, in {len(told)} steps from step "
        f"{told[0][0]:,} to {told[-1][0]:,}.",
        map=row_chart((_row(layer, load) for layer, load in loads.items()), EXPERT, most),
        legend=fill_legend((f"heat-{n}", word) for n, word in enumerate(words)),
        table=_table(loads),
    )


def _row(layer: str, load: Sequence[int]) -> Row:
    mean = sum(load) / len(load) or 1.0
    bars = [
        Bar(
            expert,
            expert + 1,
            f"heat-{sum(tokens >= heat * mean for heat in HEATS)}",
            "",
            f"layer {layer}, expert {expert}: {tokens:,} tokens, {tokens / mean:.2f} of the mean",
        )
        for expert, tokens in enumerate(load)
    ]
    return Row(f"layer {layer}", bars)


def _table(loads: Mapping[str, Sequence[int]]) -> Table:
    rows = []
    for layer, load in loads.items():
        mean = sum(load) / len(load) or 1.0
        most, least = max(load), min(load)
        rows.append(
            (
                f"layer {layer}",
                f"{sum(load):,}",
                f"{most / mean:.2f} (expert {load.index(most)})",
                f"{least / mean:.2f} (expert {load.index(least)})",
                str(sum(not tokens for tokens in load)),
            )
        )
    headers = ("Layer", "Tokens", "Most, of the mean", "Least, of the mean", "Without tokens")
    return Table(caption="Loads of experts", headers=headers, rows=rows, numeric=True)

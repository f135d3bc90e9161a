"""What ``weft train --profile`` found, for the page of a run: time, waits and memory of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from markupsafe import Markup

from weft.report.html import Table
from weft.report.svg import Axis, Bar, Chart, Row, Scale, Series, fill_legend, line_chart, row_chart
from weft.report.timelines import TIME, phase
from weft.report.units import gib, seconds

PARTS = {
    "computing": "fill-0",
    "exposed communication": "fill-2",
    "host waits": "fill-5",
    "idle": "fill-none",
}
"""Look of where a step's time went."""
MEMORY = {
    "parameters": "fill-0",
    "masters": "fill-6",
    "gradients": "fill-1",
    "optimizer": "fill-3",
    "activations and others": "fill-2",
}
"""Look of what memory holds where it holds most."""
MOST_RANKS = 32
"""Drawn; the tables tell of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilePart:
    """Pictures and tables of one section."""

    title: str
    time: Markup
    time_legend: Markup
    memory: Markup
    memory_legend: Markup
    over_time: list[tuple[Chart, Markup]]
    tables: list[Table]
    unseen: int
    """Ranks that are not drawn."""


def profile_part(record: Mapping[str, Any]) -> ProfilePart:
    """Of a run's ``profile/summary.json``."""
    ranks: Sequence[Mapping[str, Any]] = record["ranks"]
    first, last = record["steps"]
    shown = ranks[:MOST_RANKS]
    memory = [(f"rank {rank['rank']}", _held(rank["memory"])) for rank in shown]
    spent = [(f"rank {rank['rank']}", rank["parts_s"]) for rank in shown]
    most = max(sum(parts.values()) for _, parts in memory)
    fullest = max(ranks, key=lambda rank: rank["memory"]["peak_bytes"])
    return ProfilePart(
        title=f"Steps {first} to {last} were traced; times are those of one of them.",
        time=_rows(spent, PARTS, TIME, max(sum(parts.values()) for _, parts in spent)),
        time_legend=fill_legend((look, part) for part, look in PARTS.items()),
        memory=_rows(memory, MEMORY, Axis("memory of tensors", "GiB"), most),
        memory_legend=fill_legend((look, part) for part, look in MEMORY.items()),
        over_time=[_over_time(fullest)],
        tables=[_by_rank(ranks), _by_name(ranks), _by_action(ranks)],
        unseen=len(ranks) - len(shown),
    )


def _held(memory: Mapping[str, Any]) -> dict[str, float]:
    """GiB at the fullest moment; what is not kept from step to step is activations and others."""
    kept = {name: size / 2**30 for name, size in memory["kept_bytes"].items()}
    others = max(0.0, memory["peak_bytes"] / 2**30 - sum(kept.values()))
    return {**kept, "activations and others": others}


def _rows(
    found: Sequence[tuple[str, Mapping[str, float]]],
    looks: Mapping[str, str],
    axis: Axis,
    most: float,
) -> Markup:
    """Bars from zero on, one part after another."""
    rows, scale = [], Scale.of(most, axis.unit)
    for label, parts in found:
        bars, start = [], 0.0
        for part, size in parts.items():
            if size > 0:
                tip = f"{part} {scale.text(size, 3)}"
                bars.append(Bar(start, start + size, looks[part], part, tip))
                start += size
        rows.append(Row(label, bars))
    return row_chart(rows, axis, most)


def _over_time(rank: Mapping[str, Any]) -> tuple[Chart, Markup]:
    memory, name = rank["memory"], f"rank {rank['rank']}"
    microseconds = [round(1e6 * memory["every_s"] * at) for at in range(len(memory["bytes"]))]
    held: list[float | None] = [size / 2**30 for size in memory["bytes"]]
    chart = Chart(
        id="memory-over-time",
        title=f"Memory of tensors of {name} over the traced steps",
        series=[Series(label=name, x=microseconds, y=held)],
        description=f"At most {gib(memory['peak_bytes'])}, in {memory['peak_in'] or 'no action'}.",
        y=Axis("memory of tensors", "GiB"),
        x=Axis("microseconds"),
        from_zero=True,
    )
    return chart, line_chart(chart)


def _by_rank(ranks: Sequence[Mapping[str, Any]]) -> Table:
    headers = ("Rank", "Step", *(part.capitalize() for part in PARTS), "Most memory", "In")
    rows = [
        (
            str(rank["rank"]),
            seconds(rank["step_s"]),
            *(_time(rank["parts_s"][part], rank["step_s"]) for part in PARTS),
            gib(rank["memory"]["peak_bytes"]),
            rank["memory"]["peak_in"] or "no action",
        )
        for rank in ranks
    ]
    return Table(
        caption="Where the time of each rank went",
        headers=headers,
        rows=rows,
        numeric=headers[1:-1],
    )


def _by_name(ranks: Sequence[Mapping[str, Any]]) -> Table:
    """Of all ranks together: their mean, and who has most of it."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for rank in ranks:
        for row in rank["names"]:
            of_ranks = found.setdefault((row["part"], _words(row["name"])), {})
            of_ranks[rank["rank"]] = row["s"]
    headers = ("What", "Name", "Mean of the ranks", "Most", "Of rank")
    rows = []
    order = list(PARTS)
    for (part, name), each in sorted(
        found.items(), key=lambda item: (order.index(item[0][0]), -sum(item[1].values()))
    ):
        most = max(each, key=lambda rank: each[rank])
        mean = fmean(each.get(rank["rank"], 0.0) for rank in ranks)
        rows.append((part, name, seconds(mean), seconds(each[most]), str(most)))
    return Table(
        caption="The time of one step, by name", headers=headers, rows=rows, numeric=headers[2:]
    )


def _by_action(ranks: Sequence[Mapping[str, Any]]) -> Table:
    headers = ("During", "Most memory", "Of rank")
    rows = list(_peaks(ranks))
    return Table(
        caption="Most memory of tensors, by action", headers=headers, rows=rows, numeric=headers[1:]
    )


def _peaks(ranks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    most: dict[str, tuple[int, int]] = {}
    for rank in ranks:
        for row in rank["memory"]["actions"]:
            name = _words(row["name"])
            most[name] = max(most.get(name, (0, 0)), (row["peak_bytes"], rank["rank"]))
    for name, (size, rank_number) in sorted(most.items(), key=lambda item: -item[1][0]):
        yield name, gib(size), str(rank_number)


def _words(name: str) -> str:
    """``F forward`` for ``F``."""
    return phase(name) or name


def _time(part: float, whole: float) -> str:
    return f"{seconds(part)} ({part / whole:.0%})" if whole else seconds(part)

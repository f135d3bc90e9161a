"""Goodput and what happened to a run, for its page: one timeline, and where the time went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from weft.report.events import Event
from weft.report.goodput import PARTS, Goodput, Span, goodput, goodput_in_words, spans
from weft.report.html import Table
from weft.report.metrics import StepMetrics
from weft.report.svg import Axis, Bar, Row, fill_legend, row_chart
from weft.report.units import duration, percent_or_na, seconds
from weft.report.waits import HEADERS, MOST_RANKS, NUMBERS, wait_rows

LOOKS = dict(
    zip(
        PARTS,
        ("fill-0", "fill-4", "fill-6", "fill-5", "fill-3", "fill-1", "fill-2", "fill-8"),
        strict=True,
    )
)
ROWS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "copied and saved": (("save_begun", "save_finished", "snapshot"), "fill-3"),
    "not saved": (("save_failed", "save_skipped"), "fill-2"),
    "evaluated": (("evaluation",), "fill-1"),
    "odd numbers": (("spike", "rewind", "not_finite"), "fill-4"),
    "slow": (("straggler", "drift", "balance"), "fill-8"),
    "lost": (("epoch_end",), "fill-5"),
    "begun": (("start", "restart", "restore"), "fill-6"),
}
"""Kinds of events of each row of the timeline; what is of none is in a last one."""
_OTHERS, _OTHERS_FILL = "others", "fill-7"
PLACES = 200
"""Along a row: events that are nearer to each other are one mark that tells of all."""
MOST_TOLD = 5
"""Events that one mark tells of."""
MOST_LISTED = 100
TIME = Axis("time of the run", "s")


@dataclass(frozen=True, kw_only=True, slots=True)
class GoodputPart:
    """Pictures and tables of one section."""

    title: str
    timeline: Markup
    legend: Markup
    tables: list[Table]


def goodput_part(
    events: Sequence[Event], steps: Sequence[StepMetrics], summary: Mapping[str, Any]
) -> GoodputPart | None:
    """Of a run's events; None where no start is recorded. ``summary`` says who waited for whom."""
    found, starts = goodput(events, steps), spans(events, steps)
    if found is None or found.share is None:
        return None
    clock = _Clock(starts)
    whole = found.wall_s - found.away_s
    rows = [_whole(found), _life(starts, clock), *_happened(events, clock, whole)]
    return GoodputPart(
        title=f"{goodput_in_words(found).capitalize()}.",
        timeline=row_chart(rows, TIME, whole),
        legend=fill_legend((LOOKS[name], words) for name, words in PARTS.items()),
        tables=[_shares(found, whole), *_waits(summary), _listed(events)],
    )


def _waits(summary: Mapping[str, Any]) -> Iterator[Table]:
    if rows := wait_rows(summary):
        caption = f"Who waits for others ({MOST_RANKS} ranks at most)"
        yield Table(caption=caption, headers=HEADERS, rows=rows, numeric=NUMBERS)


class _Clock:
    """Time of the run without that in which nobody ran it."""

    def __init__(self, starts: Sequence[Span]) -> None:
        gaps = [(a.over_s, b.begin_s) for a, b in pairwise(starts) if not b.is_restart]
        self._gaps = [(start, end) for start, end in gaps if end > start]

    def __call__(self, elapsed_s: float) -> float:
        away = (max(min(elapsed_s, end) - start, 0.0) for start, end in self._gaps)
        return elapsed_s - sum(away)


def _whole(found: Goodput) -> Row:
    """What the time went into, added up."""
    bars, start = [], 0.0
    for name, took in found.parts().items():
        if took > 0:
            tip = f"{PARTS[name]} {seconds(took)}"
            bars.append(Bar(start, start + took, LOOKS[name], PARTS[name], tip))
            start += took
    return Row("in all", bars)


def _life(starts: Sequence[Span], clock: _Clock) -> Row:
    """When the run began and was at work."""
    bars = []
    for at, span in enumerate(starts):
        after = starts[at + 1] if at + 1 < len(starts) else None
        lost_until = after.begin_s if after is not None and after.is_restart else span.over_s
        pieces = [
            ("startup_s", span.begin_s, span.start_s, "begins"),
            ("useful_s", span.start_s, span.last_s, "trains"),
            ("between_s", span.last_s, lost_until, "is lost"),
        ]
        for name, start, end, what in pieces:
            if end > start:
                tip = f"start {at + 1} {what} for {seconds(end - start)}"
                bars.append(Bar(clock(start), clock(end), LOOKS[name], what, tip))
    return Row("starts", bars)


def _happened(events: Sequence[Event], clock: _Clock, whole: float) -> Iterator[Row]:
    """A row for each group of kinds that there is one of."""
    known = {kind for kinds, _ in ROWS.values() for kind in kinds}
    for label, (kinds, fill) in ROWS.items():
        mine = [event for event in events if event.kind in kinds]
        if mine:
            yield _marks(label, mine, fill, clock, whole)
    others = [event for event in events if event.kind not in known]
    if others:
        yield _marks(_OTHERS, others, _OTHERS_FILL, clock, whole)


def _marks(label: str, events: Sequence[Event], fill: str, clock: _Clock, whole: float) -> Row:
    places: dict[int, list[Event]] = {}
    for event in events:
        part = clock(event.elapsed_s) / whole
        places.setdefault(max(min(int(PLACES * part), PLACES - 1), 0), []).append(event)
    width = whole / PLACES
    return Row(
        label,
        [Bar(at * width, (at + 1) * width, fill, "", _tip(here)) for at, here in places.items()],
    )


def _tip(events: Sequence[Event]) -> str:
    lines = [f"{duration(e.elapsed_s)}: {e.message or e.kind}" for e in events[:MOST_TOLD]]
    more = len(events) - MOST_TOLD
    return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)


def _shares(found: Goodput, whole: float) -> Table:
    rows = [
        (PARTS[name].capitalize(), seconds(took), percent_or_na(took / whole))
        for name, took in found.parts().items()
    ]
    headers = ("What", "Time", "Part")
    return Table(caption="What the time went into", headers=headers, rows=rows, numeric=True)


def _listed(events: Sequence[Event]) -> Table:
    last = events[-MOST_LISTED:]
    unseen = len(events) - len(last)
    caption = f"The last {len(last)} events of {len(events)}" if unseen else "What happened"
    rows = [
        (
            duration(event.elapsed_s),
            event.kind.replace("_", " "),
            "" if event.step is None else f"{event.step:,}",
            "" if event.rank is None else str(event.rank),
            event.message,
        )
        for event in last
    ]
    headers = ("After", "Event", "Step", "Rank", "What")
    return Table(caption=caption, headers=headers, rows=rows, numeric=("Step", "Rank"))

"""One step in time, as rows of a chart: for the page of a plan and that of a mix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from markupsafe import Markup

from weft.report.svg import Axis, Bar, Row, Scale, fill_legend
from weft.simulate.play import Timeline

TIME = Axis("time of one step", "s")
_PHASES = {
    "F": ("fill-0", "F forward"),
    "B": ("fill-1", "B backward"),
    "I": ("fill-6", "I backward of inputs"),
    "W": ("fill-4", "W backward of weights"),
}


def timeline_rows(timeline: Timeline, labels: Sequence[str], end_s: float) -> Iterator[Row]:
    """A row for every position, with what it does until then; each box says what it is when
    pointed at."""
    scale = Scale.of(end_s, "s")
    for label, row in zip(labels, timeline.spans, strict=True):
        bars = []
        for action, start, end in takewhile(lambda span: span.end_s <= end_s, row):
            tip = f"{action}, {scale.text(start)} to {scale.text(end)}"
            bars.append(Bar(start, end, _PHASES[action.kind][0], action.kind, tip))
        yield Row(label, bars)


def phase_legend() -> Markup:
    """What the boxes are."""
    return fill_legend(_PHASES.values())


def phase(kind: str) -> str:
    """``F forward`` for ``F``; empty for what is no kind of action."""
    return _PHASES[kind][1] if kind in _PHASES else ""

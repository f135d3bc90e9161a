"""Charts of all pages: lines over an axis, and rows of bars along one, as SVG.

Places along an axis are percents of a chart's width, so it fits any page while its text keeps its
size. What differs in colour also differs in its dashes, or has its name on it. Text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from markupsafe import Markup, escape

Look = Literal["main", "second", "faint", "points", "level-1", "level-2", "band"]
"""How a series is drawn: ``faint`` without its last value, ``points`` marked, ``level`` as one
height with its name on it, ``band`` as the area between a height and the same below zero."""

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SMALL_PREFIXES = ((1e-3, "m"), (1e-6, "\N{MICRO SIGN}"), (1e-9, "n"))
_MOST_TICKS = 6
_LARGEST = 1e300
"""Of an axis: a curve that goes beyond leaves it."""
_HIT_STRIPS = 60
"""Places of a line chart that say their numbers when pointed at."""
_THIN = 0.006
"""A bar that is a smaller part of its row has no rim, which would hide it."""
_NARROWEST, _CHARACTER = 4.2, 6.8
"""A percent of a row, and a character in it, in pixels: text is left out where it may not fit."""


class Axis(NamedTuple):
    """What is counted along an edge of a chart."""

    label: str
    unit: str = ""
    """``s`` and ``J`` get small prefixes, ``GiB`` its own; other units large ones."""

    @property
    def title(self) -> str:
        """Symbols stand beside each number, other units here."""
        return self.label if self.unit in {"", "s", "GiB"} else f"{self.label} ({self.unit})"


_STEP = Axis("step")


class Scale(NamedTuple):
    """How numbers of one size are written."""

    factor: float
    suffix: str

    @staticmethod
    def of(largest: float, unit: str) -> Scale:
        """For numbers up to so much, either way."""
        size = abs(largest)
        if unit == "GiB":
            steps = ((1.0, "GiB"), (2.0**-10, "MiB"), (2.0**-20, "KiB"))
            factor, name = next((s for s in steps if size >= s[0]), steps[0])
            return Scale(factor, f" {name}")
        if unit in {"s", "J"}:
            known = _PREFIXES[-1:] + _SMALL_PREFIXES
            factor, prefix = next((p for p in known if size >= p[0]), (1.0, ""))
            return Scale(factor, f" {prefix}{unit}")
        if 1e-300 < size < 0.01:
            power = math.floor(math.log10(size))
            return Scale(10.0**power, f"e{power}")
        factor, prefix = next((p for p in _PREFIXES if size >= max(p[0], 1e4)), (1.0, ""))
        return Scale(factor, f" {prefix}".rstrip())

    def text(self, number: float, digits: int = 4) -> str:
        """``12.5 ms``."""
        return f"{number / self.factor:.{digits}g}{self.suffix}" if number else "0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve. ``y`` has None where there is no finite number."""

    label: str
    x: list[int]
    y: list[float | None]
    look: Look = "main"

    @property
    def last(self) -> float | None:
        """The last finite number."""
        return next((value for value in reversed(self.y) if value is not None), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One set of axes."""

    id: str
    title: str
    series: list[Series]
    description: str
    """The curves in words, for those who do not see them."""
    y: Axis
    x: Axis = _STEP
    from_zero: bool = False
    """The lower edge is zero."""
    marks: Sequence[tuple[float, str]] = ()
    """Places on the axis, and what happened there."""
    top: Sequence[tuple[float, str]] = ()
    """A second axis along the upper edge: places on the first, and what is written there."""
    top_title: str = ""
    height: int = 180


class Bar(NamedTuple):
    """A part of a row, from one place of the axis to another."""

    start: float
    end: float
    fill: str
    """A class of the style sheet: ``fill-0`` to ``fill-8``, or ``fill-none``."""
    text: str
    tip: str


class Row(NamedTuple):
    """Bars one after another, beside a label."""

    label: str
    bars: Sequence[Bar]
    limit: float | None = None
    """A place that is marked across the bars."""


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart), seven at most."""
    step = _tick_step(high - low, whole=whole)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _tick_step(span: float, *, whole: bool) -> float:
    power = math.floor(math.log10(span / _MOST_TICKS))
    steps = [factor * 10.0**p for p in (power, power + 1) for factor in (1, 2, 5)]
    found = next(step for step in steps if span / step <= _MOST_TICKS)
    return max(found, 1.0) if whole else found


def tag(name: str, *inside: str, **attributes: object) -> Markup:
    """An element; ``class_`` writes ``class`` and ``aria_label`` ``aria-label``."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
    )
    text = "".join(map(escape, inside))
    return Markup(f"<{name}{words}>{text}</{name}>" if inside else f"<{name}{words}/>")


def _percent(part: float) -> str:
    return f"{100 * part:.4g}%"


def line_chart(chart: Chart) -> Markup:
    """The chart with its axes, and a legend where there is more than one series."""
    return _Lines(chart).drawn()


class _Lines:
    """A chart on its way to the page: pixels from top to bottom, parts of the width across."""

    def __init__(self, chart: Chart) -> None:
        self.chart = chart
        self.top = 50 if chart.top else 32
        self.bottom = self.top + chart.height
        numbers = [x for series in chart.series for x in series.x]
        self.left = float(min(numbers))
        self.right = max(float(max(numbers)), self.left + max(1.0, abs(self.left) * 1e-9))
        values = [v for series in chart.series for v in series.y if v is not None]
        values += [-v for s in chart.series if s.look == "band" for v in s.y if v is not None]
        low, high = min(values, default=0.0), max(values, default=1.0)
        low = min(low, 0.0) if chart.from_zero else low
        low, high = (min(max(edge, -_LARGEST), _LARGEST) for edge in (low, high))
        if high - low <= 1e-12 * max(abs(low), abs(high), 1e-200):
            room = abs(high) / 10 or 1.0
            low, high = low - room * (not chart.from_zero), high + room
        self.scale = Scale.of(max(abs(low), abs(high)), chart.y.unit)
        step = _tick_step((high - low) / self.scale.factor, whole=False) * self.scale.factor
        self.low, self.high = math.floor(low / step) * step, math.ceil(high / step) * step

    def x(self, value: float) -> float:
        """Its part of the width."""
        return (value - self.left) / (self.right - self.left)

    def y(self, value: float) -> float:
        """Its part of the height, from above."""
        return 1 - (value - self.low) / (self.high - self.low)

    def pixel(self, value: float) -> float:
        return round(self.top + self.chart.height * self.y(value), 1)

    def drawn(self) -> Markup:
        chart = self.chart
        lines = [shape for series in chart.series for shape in self._shapes(series)]
        inner = tag(
            "svg", *lines or [Markup("")], y=self.top, width="100%", height=chart.height,
            viewBox="0 0 1000 1000", preserveAspectRatio="none",
        )  # fmt: skip
        picture = tag(
            "svg", *self._axes(), inner, *self._points(), *self._marks(), *self._labels(),
            *self._hits(), class_="chart", role="img", aria_label=chart.description,
            height=self.bottom + 42,
        )  # fmt: skip
        shown = [series for series in chart.series if not series.look.startswith("level")]
        keys = [(str(s.look), s.label) for s in shown]
        keys += [("mark", what) for what in dict.fromkeys(what for _, what in chart.marks)]
        legend = line_legend(keys) if len(shown) > 1 else Markup("")
        return tag("div", picture, class_="plot") + legend

    def _axes(self) -> Iterator[Markup]:
        chart, middle = self.chart, {"text_anchor": "middle"}
        factor = self.scale.factor
        for value in ticks(self.low / factor, self.high / factor):
            y, text = self.pixel(value * factor), self.scale.text(value * factor)
            yield tag("line", class_="grid", x1=0, x2="100%", y1=y, y2=y)
            yield tag("text", text, x=-8, y=y + 4, text_anchor="end")
        across = Scale.of(self.right, chart.x.unit)
        places = ticks(self.left, self.right, whole=chart.x.unit in {"", "tokens"})
        for value in places:
            x, text = _percent(self.x(value)), across.text(value)
            yield tag("line", class_="grid", x1=x, x2=x, y1=self.top, y2=self.bottom + 4)
            yield tag("text", text, x=x, y=self.bottom + 18, **middle)
        for value, text in chart.top:
            x = _percent(self.x(value))
            yield tag("line", class_="grid", x1=x, x2=x, y1=self.top - 4, y2=self.top)
            yield tag("text", text, x=x, y=self.top - 8, **middle)
        yield tag("text", chart.y.title, x=-52, y=12)
        yield tag("text", chart.x.title, x="50%", y=self.bottom + 36, **middle)
        if chart.top:
            yield tag("text", chart.top_title, x="100%", y=12, text_anchor="end")

    def _shapes(self, series: Series) -> Iterator[Markup]:
        """Lines, broken where there is no number; an area."""
        places = zip(series.x, series.y, strict=True)
        runs = [list(run) for is_gap, run in groupby(places, lambda p: p[1] is None) if not is_gap]
        shape = "polyline"
        if series.look == "band":
            edge = [(x, y) for run in runs for x, y in run if y is not None]
            runs, shape = [[*edge, *((x, -y) for x, y in reversed(edge))]], "polygon"
        for run in runs:
            spots = ((1000 * self.x(x), 1000 * self.y(y)) for x, y in run if y is not None)
            where = " ".join(f"{x:.4g},{y:.4g}" for x, y in spots)
            if len(run) > 1:
                yield tag(shape, class_=f"line {series.look}", points=where)

    def _points(self) -> Iterator[Markup]:
        """Of those that are marked, and of a series that is one point only."""
        for series in self.chart.series:
            known = [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None]
            if series.look == "points" or len(known) == 1:
                for x, y in known:
                    at = {"cx": _percent(self.x(x)), "cy": self.pixel(y)}
                    yield tag("circle", class_=f"point {series.look}", r=4, **at)

    def _marks(self) -> Iterator[Markup]:
        written = -1.0
        for place, what in self.chart.marks:
            part = self.x(place)
            x = _percent(part)
            yield tag("line", class_="mark", x1=x, x2=x, y1=self.top, y2=self.bottom)
            if part - written > 0.16 and part < 0.86:
                yield tag("text", what, x=x, dx=4, y=self.bottom - 6)
                written = part

    def _labels(self) -> Iterator[Markup]:
        """Each curve's last value at its end, apart from each other; a level's name on it."""
        last = [(s, s.last) for s in self.chart.series if s.last is not None]
        levels = [(s, value) for s, value in last if s.look.startswith("level")]
        curves = [value for s, value in last if s.look in {"main", "second", "points"}]
        ends = sorted((self.pixel(value), value) for value in curves)
        for series, value in levels:
            y, text = self.pixel(value), f"{series.label} {self.scale.text(value)}"
            below = any(0 <= y - end <= 24 for end, _ in ends)
            yield tag("text", text, x="100%", dx=-4, y=y + (14 if below else -4), text_anchor="end")
        lowest = 0.0
        for y, value in ends:
            scale = Scale.of(value, self.chart.y.unit)
            text, lowest = scale.text(value, 3 if scale.suffix else 4), max(y + 4, lowest + 14)
            yield tag("text", text, class_="last", x="100%", dx=8, y=lowest)

    def _hits(self) -> Iterator[Markup]:
        """Strips that are not seen and say the numbers beneath them when pointed at."""
        curves = [s for s in self.chart.series if not s.look.startswith("level")]
        steps = sorted({x for series in curves for x in series.x})
        each = max(1, math.ceil(len(steps) / _HIT_STRIPS))
        tables = [(s.label, dict(zip(s.x, s.y, strict=True))) for s in curves]
        before = self.left
        for step in [*steps[each - 1 :: each], *steps[-1:]]:
            found = ((label, of.get(step)) for label, of in tables)
            said = [f"{label} {self.scale.text(y)}" for label, y in found if y is not None]
            if said and step > before:
                title = tag("title", f"{self.chart.x.label} {step:,}: {', '.join(said)}")
                start, width = self.x(before), self.x(step) - self.x(before)
                where = {"x": _percent(start), "width": _percent(width), "y": self.top}
                yield tag("rect", title, class_="hit", height=self.chart.height, **where)
            before = step


def line_legend(keys: Iterable[tuple[str, str]]) -> Markup:
    """A list of (look, name)."""
    samples = {
        "points": tag("circle", class_="point points", cx=13, cy=7, r=4),
        "band": tag("rect", class_="line band", y=1, width=26, height=12),
    }
    line = {"x1": 0, "x2": 26, "y1": 7, "y2": 7}
    return _legend(
        (tag("line", class_=f"line {look}", **line) + samples.get(look, Markup("")), 26, name)
        for look, name in keys
    )


def fill_legend(keys: Iterable[tuple[str, str]]) -> Markup:
    """A list of (classes of a box, name)."""
    box = {"x": 1, "y": 1, "width": 14, "height": 12, "rx": 2}
    return _legend((tag("rect", class_=fill, **box), 16, name) for fill, name in keys)


def _legend(keys: Iterable[tuple[Markup, int, str]]) -> Markup:
    """Of samples, their widths and names."""
    items = (
        tag("li", tag("svg", sample, width=width, height=14, aria_hidden="true"), name)
        for sample, width, name in keys
    )
    return tag("ul", *items, class_="legend")


def row_chart(rows: Iterable[Row], axis: Axis, end: float) -> Markup:
    """Rows of bars over one axis from 0 to ``end``."""
    whole = end or 1.0
    scale = Scale.of(whole, axis.unit)
    places = [value * scale.factor for value in ticks(0.0, whole / scale.factor)]
    grid = [
        tag("line", class_="grid", x1=x, x2=x, y1=0, y2="100%")
        for x in (_percent(value / whole) for value in places)
    ]
    parts = [_row(row, grid, whole) for row in rows]
    numbers = [
        tag("text", scale.text(value), x=_percent(value / whole), y=14, text_anchor=anchor)
        for value in places
        for anchor in ["start" if not value else "end" if value > 0.97 * whole else "middle"]
    ]
    last = tag("svg", *numbers, height=20, aria_hidden="true")
    parts.append(tag("div", tag("span", axis.title), last, class_="row axis"))
    return tag("div", *parts, class_="rows")


def _row(row: Row, grid: Sequence[Markup], whole: float) -> Markup:
    shapes = [tag("rect", class_="track", width="100%", height="100%"), *grid]
    for bar in row.bars:
        start, part = bar.start / whole, (bar.end - bar.start) / whole
        where = {"x": _percent(start), "width": _percent(part), "y": 2, "height": 20}
        look = f"bar {bar.fill}" if part >= _THIN else f"bar thin {bar.fill}"
        shapes.append(tag("rect", tag("title", bar.tip), class_=look, **where))
        if bar.text and _NARROWEST * 100 * part >= _CHARACTER * len(bar.text) + 4:
            middle = _percent(start + part / 2)
            shapes.append(tag("text", bar.text, class_="in-bar", x=middle, y=16))
    if row.limit is not None:
        x = _percent(min(row.limit / whole, 1.0))
        shapes.append(tag("line", class_="limit", x1=x, x2=x, y1=0, y2="100%"))
    picture = tag("svg", *shapes, height=24, aria_hidden="true")
    return tag("div", tag("span", row.label), picture, class_="row")

"""Rows of bars along an axis: a step in time, memory against its limit."""

from __future__ import annotations

import pytest
from report_page import Element, Page
from schedules.test_schedules import pipeline

from weft.cost.times import BorderTimes, StageTimes
from weft.report.svg import Axis, Bar, Row, row_chart
from weft.report.timelines import TIME, timeline_rows
from weft.simulate.play import simulate_plan


def drawn(rows: list[Row], axis: Axis, end: float) -> list[Element]:
    """The elements of each row, the axis last."""
    page = Page(str(row_chart(rows, axis, end))).root
    return [x for x in page.all("div") if x.attributes["class"] != "rows"]


def bars(row: Element) -> list[Element]:
    return [x for x in row.all("rect") if x.attributes["class"].startswith("bar")]


def percent(element: Element, name: str) -> float:
    return float(element.attributes[name].removesuffix("%"))


def test_a_timeline_has_a_box_for_every_action_and_an_axis_of_time() -> None:
    even, free = StageTimes(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0), BorderTimes()
    timeline = simulate_plan(pipeline("zb-v", 2, 3), [even] * 4, [free] * 3)
    *rows, axis = drawn(
        list(timeline_rows(timeline, ["a <b>", "b"], timeline.step_s)), TIME, timeline.step_s
    )
    boxes = [box for row in rows for box in bars(row)]
    assert [row.one("span").text for row in rows] == ["a <b>", "b"]
    assert len(boxes) == 4 * 3 * 3
    assert max(percent(x, "x") + percent(x, "width") for x in boxes) == pytest.approx(100, abs=0.1)
    assert {x.attributes["class"] for x in boxes} == {"bar fill-0", "bar fill-6", "bar fill-4"}
    assert boxes[0].one("title").text.endswith("0 to 1 s")
    assert axis.one("span").text == "time of one step"
    assert [x.text for x in axis.all("text")][:2] == ["0", "5 s"]


def test_memory_is_drawn_against_its_limit() -> None:
    bars_held = [Bar(0, 40, "fill-0", "weights", ""), Bar(40, 40.5, "fill-1", "x", "")]
    held = Row("rank 0", bars_held, 80)
    row, axis = drawn([held], Axis("memory", "GiB"), 160.0)
    assert [percent(box, "width") for box in bars(row)] == [25, 0.3125]
    assert [x.attributes["class"] for x in bars(row)] == ["bar fill-0", "bar thin fill-1"]
    assert [x.text for x in row.all("text")] == ["weights"], "where it fits"
    (limit,) = (x for x in row.all("line") if x.attributes["class"] == "limit")
    assert limit.attributes["x1"] == "50%"
    assert [x.text for x in axis.all("text")] == ["0", "50 GiB", "100 GiB", "150 GiB"]

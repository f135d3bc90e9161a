"""The page of a plan: which chip where, and the parts of a step on an axis of time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from report_page import Element, Page, rows

from weft.cli.main import run

POOLS = [{"chip": name, "nodes": 1, "chips_per_node": 8} for name in ("H100-SXM5-80GB", "MI300X")]
HALF = "{stages: [{dp: 2, tp: 2, zero: 1, recompute: full}]}"
PIPELINES = (
    f"plan.pipelines=[{HALF}, {HALF}, {{stages: [{{dp: 2, tp: 4, zero: 1, recompute: full}}]}}]"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Element:
    folder = tmp_path_factory.mktemp("plan")
    cluster, html = folder / "cluster.yaml", folder / "plan.html"
    cluster.write_text(json.dumps({"pools": POOLS}))
    words = ["model.size=llama3-8b", "data.seq_len=2048", "batch.samples=48", "batch.micro=4"]
    page = ["--cluster", str(cluster), "--html", str(html), "plan.schedule=null", PIPELINES]
    assert run(["plan", "demo", *words, *page]) == 0
    return Page(Path(html).read_text()).root


def test_the_page_says_how_sure_the_step_is(page: Element) -> None:
    (said,) = (x for x in page.all("div") if x.all("dt") and x.one("dt").text == "Step")
    assert len(said.all("dd")) == 2
    assert re.search(r"80% of such steps: [\d.]+ m?s to [\d.]+ m?s$", said.all("dd")[1].text)


def section(page: Element, name: str) -> Element:
    return page.one("section", id=name)


def charts(part: Element) -> list[list[Element]]:
    """The rows of each chart, the axis last."""
    found = [x for x in part.all("div") if x.attributes.get("class") == "rows"]
    return [chart.children for chart in found]


def test_boxes_say_chip_mesh_and_zero_and_have_the_colour_of_their_vendor(page: Element) -> None:
    plan = section(page, "plan")
    picture = plan.one("svg", **{"class": "plan"})
    looks = [x.attributes["class"] for x in picture.all("rect")]
    assert [look for look in looks if look.startswith("chip ")] == [
        *["chip vendor-0 shade-0"] * 2,
        "chip vendor-1 shade-0",
    ]
    texts = [x.text for x in picture.all("text")]
    for text in ("4 × NVIDIA H100-SXM5-80GB", "dp 2 tp 2 · ZeRO 1"):  # noqa: RUF001
        assert texts.count(text) == 2, text
    for text in ("8 × AMD MI300X", "dp 2 tp 4 · ZeRO 1", "ranks 8–15"):  # noqa: RUF001
        assert texts.count(text) == 1, text
    legend = [item.text for item in plan.one("ul").all("li")]
    assert legend == ["NVIDIA H100-SXM5-80GB", "AMD MI300X"]


def test_the_parts_of_a_step_stand_on_an_axis_of_time(page: Element) -> None:
    """Pipelines that do the same are one row; parts of a row add up to the step."""
    step = section(page, "step")
    (alike, other, axis), *timelines = charts(step)
    assert [row.one("span").text for row in (alike, other)] == [
        "Stage 0 of pipelines 0–1, each (4 x H100-SXM5-80GB)",  # noqa: RUF001
        "Stage 0 of pipeline 2 (8 x MI300X)",
    ]
    assert axis.one("span").text == "time of one step"
    assert axis.all("text")[0].text == "0" and axis.all("text")[-1].text.endswith("s")
    parts = [x.one("title").text.rsplit(" ", 2)[0] for x in other.all("rect") if x.children]
    assert parts[:3] == ["compute", "communication", "exchange and update"]
    for row in (alike, other):
        widths = [float(x.attributes["width"][:-1]) for x in row.all("rect") if x.children]
        assert sum(widths) == pytest.approx(100, abs=0.5)
    assert len(timelines) == 2, "of two pipelines that are equal, and of the third"
    assert "compute" in step.text and "F forward" in step.text
    table, memory, _ = section(page, "numbers").all("table")
    assert rows(table)[0] == ["Stage", "compute", "communication", "exchange and update", "idle"]
    assert rows(memory)[1][0] == alike.one("span").text


def test_memory_stands_against_what_the_chip_has(page: Element) -> None:
    ((alike, other, axis),) = charts(section(page, "memory"))
    limits = [
        x.attributes["x1"]
        for row in (alike, other)
        for x in row.all("line")
        if x.attributes["class"] == "limit"
    ]
    assert limits == [f"{100 * 80 / 192:.4g}%", "100%"]
    assert other.one("span").text.endswith(" of 192 GiB")
    assert axis.all("text")[-1].text == "150 GiB"

"""The curves of a report."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from report_cases import make_run, write_metrics
from report_page import Page, data_of, everything, plots, read, rows, section

from weft.report.charts import MOST_POINTS, charts, smooth
from weft.report.metrics import read_metrics
from weft.report.svg import Axis, Chart, Scale, Series, line_chart, ticks


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path)


def test_charts(run: Path) -> None:
    drawn = data_of(run)
    assert list(drawn) == list(plots(read(run)))
    assert list(drawn) == ["loss", "throughput", "lr", "grad-norm", "memory"]
    loss = {series["label"]: series for series in drawn["loss"]["series"]}
    assert list(loss) == [
        "training",
        "training, smoothed",
        "held-out",
        "bigram baseline",
        "unigram baseline",
    ]
    assert loss["training"]["x"] == list(range(1, 121))
    assert loss["training"]["y"][0] == pytest.approx(4 + 4 * 0.98)
    assert loss["training"]["y"][12] is None
    assert loss["held-out"]["x"] == [50, 100]
    assert loss["held-out"]["y"] == pytest.approx([4.5 + 4 * 0.98**50, 4.5 + 4 * 0.98**100])
    assert (loss["unigram baseline"]["x"], loss["unigram baseline"]["y"]) == ([1, 120], [6.5, 6.5])
    assert "training 7.92 at step 1, 4.354 at step 120" in drawn["loss"]["description"]


def test_charts_are_described_in_words_and_have_axes(run: Path) -> None:
    page = read(run)
    for name, chart in data_of(run).items():
        picture = plots(page)[name]
        assert picture.attributes["role"] == "img"
        assert picture.attributes["aria-label"] == chart["description"]
    texts = [x.text for x in plots(page)["loss"].all("text")]
    assert {"loss (nats per token)", "step", "tokens", "20", "120", "200 k"} <= set(texts)
    assert {"bigram baseline 5.25", "unigram baseline 6.5"} <= set(texts), "levels say their names"
    last = [x for x in plots(page)["loss"].all("text") if x.attributes.get("class") == "last"]
    assert sorted(float(x.text) for x in last) == pytest.approx([4.355, 5.03], abs=0.02)
    heights = [float(x.attributes["y"]) for x in last]
    assert abs(heights[0] - heights[1]) >= 14, "and can be read"


@pytest.mark.parametrize(("loss", "below"), [(5.0, True), (2.0, False)])
def test_the_name_of_a_level_makes_way_for_a_curve(loss: float, below: bool) -> None:
    """That ends just above it."""
    level = Series(label="level", x=[1, 2], y=[4.9, 4.9], look="level-1")
    curve = Series(label="curve", x=[1, 2], y=[0.0, loss])
    chart = Chart(id="a", title="", series=[level, curve], description="", y=Axis("y"))
    texts = Page(str(line_chart(chart))).root.all("text")
    (name,) = (float(x.attributes["y"]) for x in texts if x.text == "level 4.9")
    (end,) = (float(x.attributes["y"]) for x in texts if x.attributes.get("class") == "last")
    assert (name > end + 12) == below


SIZES = [0, -1, 5e-324, 1e-300, 1e308, -1e308, 10**18, 10**400, "x"]


@pytest.mark.parametrize("value", SIZES, ids=lambda value: str(value)[:8])
def test_numbers_of_any_size_are_drawn(run: Path, value: float | str) -> None:
    """Whatever a file says; every place is a number."""
    file = run / "metrics.jsonl"
    write_metrics(file, 3, eval_every=2)
    normal = [json.loads(line) for line in file.read_text().splitlines()]
    keys = ["loss", "tokens", "lr", "memory_gib", "elapsed_s", "eval_loss"]
    for key in keys + ["step"] * isinstance(value, int):
        for at in range(len(normal)):
            lines = [line | ({key: value} if n == at else {}) for n, line in enumerate(normal)]
            file.write_text("\n".join(map(json.dumps, lines)))
            for chart in charts(*read_metrics(file), {}):
                places = re.findall(r'="([^"]*)"', line_chart(chart))
                assert not [x for x in places if re.search(r"\b(nan|inf)\b", x)], (key, at)


def test_the_axis_of_tokens_has_round_numbers_where_they_were_reached(run: Path) -> None:
    top = dict(data_of(run)["loss"]["top"])
    assert top == {33.0: "200 k", 66.0: "400 k", 98.0: "600 k"}, "6144 tokens a step"


def test_restarts_are_marked_and_their_times_added(run: Path) -> None:
    """Three starts: the second began anew after step 40, the third after 41, in its first step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line and "eval_loss" not in line]
    for line in steps:
        line["elapsed_s"] -= 20.0 * (line["step"] > 40) + 0.5 * (line["step"] > 41)
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    assert [chart["marks"] for chart in data_of(run).values()] == [
        [(41, "restart"), (42, "restart")]
    ] * 5
    page = read(run)
    marks = [x for x in plots(page)["lr"].all("line") if x.attributes.get("class") == "mark"]
    assert len(marks) == 2
    table, _ = section(page, "Training").all("table")
    assert [row[:3] for row in rows(table)[1:]] == [
        ["1", "1 to 40", "20s"],
        ["2", "41 to 41", "0s"],
        ["3", "42 to 120", "40s"],
    ]
    tiles = {x.one("dt").text: x.all("dd") for x in section(page, "Result").one("dl").all("div")}
    assert [x.text for x in tiles["Time"]] == ["4m30s", "over 3 starts"], "250 s and 20.5 before"


@pytest.mark.parametrize("steps", [1, 2, 19, 20])
def test_short_runs(run: Path, steps: int) -> None:
    write_metrics(run / "metrics.jsonl", steps)
    labels = [series["label"] for series in data_of(run)["loss"]["series"]]
    assert ("training, smoothed" in labels) == (steps >= 20)
    shapes = [x.tag for x in everything(plots(read(run))["lr"])]
    assert ("polyline" in shapes, "circle" in shapes) == (steps > 1, steps == 1)


def test_a_curve_is_broken_where_there_is_no_number(run: Path) -> None:
    assert len(plots(read(run))["grad-norm"].all("polyline")) == 1
    write_metrics(run / "metrics.jsonl", 19)
    training = [x.attributes["points"] for x in plots(read(run))["loss"].all("polyline")]
    assert [len(points.split()) for points in training] == [12, 6, 2, 2], "levels are two points"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.37, 0.52, [0.4, 0.45, 0.5]),
        (1, 120, [20, 40, 60, 80, 100, 120]),
        (-3e-7, 3e-7, [-3e-7, -2e-7, -1e-7, 0, 1e-7, 2e-7, 3e-7]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_numbers_have_prefixes() -> None:
    assert Scale.of(0.0123, "s").text(0.0123) == "12.3 ms"
    assert Scale.of(61.0, "s").text(60.0) == "60 s"
    assert Scale.of(3e-6, "s").text(3e-6) == "3 \N{MICRO SIGN}s"
    assert Scale.of(2.4e-4, "J").text(2.41e-4) == "241 \N{MICRO SIGN}J"
    assert Scale.of(0.5, "GiB").text(0.25) == "256 MiB"
    assert Scale.of(70.0, "GiB").text(40.0) == "40 GiB"
    assert Scale.of(9000, "tokens/s").text(8123) == "8123"
    assert Scale.of(2.5e6, "tokens").text(500_000) == "0.5 M"
    assert Scale.of(3e-3, "").text(2e-3) == "2e-3"


def test_a_long_run_is_thinned_and_its_peaks_stay(run: Path) -> None:
    write_metrics(run / "metrics.jsonl", 2 * MOST_POINTS + 1)
    drawn = data_of(run)
    norm = drawn["grad-norm"]["series"][0]
    assert len(norm["x"]) == len(norm["y"]) <= MOST_POINTS
    assert norm["x"][-1] == 2 * MOST_POINTS + 1
    assert max(norm["y"]) == 10.0
    training = drawn["loss"]["series"][0]
    expected = [4 + 4 * 0.98**step for step in (1, 2, 3)]
    assert (training["x"][0], training["y"][0]) == (3, pytest.approx(sum(expected) / 3))
    assert "One point stands for 3 steps" in section(read(run), "Training").text


def test_smoothing_by_hand() -> None:
    """Half-life 1: weights 1/4 1/2 1 1/2 1/4; what is not finite has none."""
    smoothed = smooth([0.0, 0.0, 8.0, math.nan, 0.0], half_life=1.0)
    assert smoothed == pytest.approx(
        [
            2 / (1 + 0.5 + 0.25 + 0.0625),
            4 / (0.5 + 1 + 0.5 + 0.125),
            8 / (0.25 + 0.5 + 1 + 0.25),
            4 / (0.125 + 0.25 + 0.5 + 0.5),
            2 / (0.0625 + 0.125 + 0.25 + 1),
        ]
    )
    assert all(math.isnan(value) for value in smooth([math.nan, math.inf], half_life=2.0))

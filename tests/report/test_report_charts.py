"""The curves of a report."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from report_cases import make_run, write_metrics
from report_page import data_of, read, section

from weft.report.charts import MOST_POINTS, smooth


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path)


def test_charts(run: Path) -> None:
    page = read(run)
    charts = data_of(page)
    assert list(charts) == ["loss", "throughput", "lr", "grad-norm", "memory"]
    loss = {series["label"]: series for series in charts["loss"]["series"]}
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
    assert "training 7.92 at step 1, 4.354 at step 120" in charts["loss"]["description"]


def test_charts_are_described_in_words(run: Path) -> None:
    page = read(run)
    for name, chart in data_of(page).items():
        place = page.one("div", id=f"chart-{name}").attributes
        assert place["role"] == "img" and place["aria-label"] == chart["description"]
    assert page.one("noscript").text.startswith("The charts need JavaScript")


@pytest.mark.parametrize("steps", [1, 2, 19, 20])
def test_short_runs(run: Path, steps: int) -> None:
    write_metrics(run / "metrics.jsonl", steps)
    labels = [series["label"] for series in data_of(read(run))["loss"]["series"]]
    assert ("training, smoothed" in labels) == (steps >= 20)


def test_a_long_run_is_thinned_and_its_peaks_stay(run: Path) -> None:
    write_metrics(run / "metrics.jsonl", 2 * MOST_POINTS + 1)
    page = read(run)
    charts = data_of(page)
    norm = charts["grad-norm"]["series"][0]
    assert len(norm["x"]) == len(norm["y"]) <= MOST_POINTS
    assert norm["x"][-1] == 2 * MOST_POINTS + 1
    assert max(norm["y"]) == 10.0
    training = charts["loss"]["series"][0]
    expected = [4 + 4 * 0.98**step for step in (1, 2, 3)]
    assert (training["x"][0], training["y"][0]) == (3, pytest.approx(sum(expected) / 3))
    assert "One point stands for 3 steps" in section(page, "Training").text


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

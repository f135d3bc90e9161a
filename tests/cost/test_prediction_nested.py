"""The nested test: what is left out has no say in its own prediction, and intervals hold others."""

from dataclasses import replace
from math import log
from typing import Any

import pytest
from cost.published_records import RECORD, write

from benchmarks.prediction import measure_left_out, read
from benchmarks.prediction_fit import problem
from benchmarks.prediction_model import names_for, time_of
from benchmarks.prediction_nested import APART, LeftOut, held_by_others, left_out, spread, spreads
from benchmarks.published import Run

MADE = {"g": "NeMo", "h": "Composer", "i": "MaxText"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Run]:
    records = [
        {**RECORD, "id": f"{group}{n}", "group": group, "framework": MADE[group], "gbs": 64 * n}
        for group in MADE
        for n in (1, 2)
    ]
    records[0]["date"], records[-1]["gpu"] = "NeMo24.07", "MI300X"
    folder = write(tmp_path_factory.mktemp("records"), *records)
    return list(read(folder).tasks[0].runs)


def predicted(runs: list[Run], by: Any = "family") -> dict[str, LeftOut]:
    names = names_for(runs, memory=False)
    around = problem(runs, time_of, {}, names)
    return {one.run.name: one for one in left_out(runs, time_of, around, by)}


def test_what_is_left_out_has_no_say(runs) -> None:
    """Its own measured times change nothing of its prediction; those of others do."""
    before = predicted(runs)
    slower = [replace(run, measured=3 * run.measured) if run.group == "h" else run for run in runs]
    after = predicted(slower)
    assert {n: one.predicted for n, one in before.items() if n[0] == "h"} == {
        n: one.predicted for n, one in after.items() if n[0] == "h"
    }
    assert after["g1"].predicted != before["g1"].predicted


def test_what_no_other_run_had_is_unknown(runs) -> None:
    found = predicted(runs)
    assert found["g1"].unknown == {"software"}
    assert found["i2"].unknown == {"software", "chip"}
    assert predicted(runs, "chip")["i2"].unknown == {"chip"}
    assert predicted(runs, "year")["g1"].unknown == frozenset()


@pytest.mark.parametrize(
    ("words", "year"),
    [("2023-11", "2023"), ("NeMo24.07", "2024"), ("v24.11.1", "2024"), ("25.09", "2025"),
     ("Megatron-LM 2020", "2020"), ("MXNet 12.3", "no year"), ("r0.8.0", "no year")],
)  # fmt: skip
def test_years_are_read_from_dates_and_versions(tmp_path, words, year) -> None:
    (run,) = read(write(tmp_path, {**RECORD, "date": words})).tasks[0].runs
    assert APART["year"](run) == year


def far(run: Run, group: str, error: float, *unknown: str) -> LeftOut:
    one = replace(run, group=group, measured=1.0)
    return LeftOut(run=one, fold=group, predicted=1 + error, unknown=frozenset(unknown))


def test_intervals_are_those_of_other_families(runs) -> None:
    """Of nine runs of as many families, and of one more, eight are inside."""
    errors = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 2.0)
    known = [far(runs[0], f"f{n}", error) for n, error in enumerate(errors)]
    assert spread(known) == pytest.approx(log(1.8))
    assert spreads(known)[0] == spreads(known)[2], "nothing is told of what is less known"
    assert held_by_others(known) == [*[True] * 8, False]
    unsure = [*known, far(runs[0], "f9", 5.0, "chip")]
    assert spreads(unsure)[0] == spreads(unsure)[1] < spreads(unsure)[2]


def test_the_headline_is_by_what_is_left_out(tmp_path) -> None:
    records = [{**RECORD, "id": f"r{n}", "group": "gh"[n % 2], "gbs": 64 * n} for n in range(1, 5)]
    rows = {row["name"]: row for row in measure_left_out(write(tmp_path, *records), "family")}
    assert rows["left_out_family:step_time:g"]["records"] == 2
    assert rows["left_out_family:step_time:families"]["records"] == 2
    assert rows["left_out_family:step_time:all"]["records"] == 4
    assert 0 <= rows["left_out_family:step_time:inside"]["ours"] <= 1
    assert rows["unpredicted"]["ours"] == 0

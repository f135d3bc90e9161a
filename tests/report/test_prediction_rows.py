"""Predicted beside measured, for people; whatever a file says."""

from __future__ import annotations

from pathlib import Path

from report_cases import change_summary, make_run
from report_page import read, rows, section

from weft.report.prediction_rows import HEADERS, prediction_note, prediction_rows

PREDICTION = {
    "predicted": {
        "step_time_s": 0.25,
        "tokens_per_s": 12000.0,
        "memory_gib": [1.5, 1.0],
        "sent_mb": None,
    },
    "measured": {
        "step_time_s": 0.2,
        "tokens_per_s": 15000.0,
        "memory_gib": [1.0, 2.0],
        "sent_mb": 6.5321,
    },
    "basis": ["a profile of Abacus core", "lab.yaml"],
    "problem": "",
}


def test_rows_of_a_run() -> None:
    """Memory is that of the rank that held most."""
    assert prediction_rows({"prediction": PREDICTION}) == [
        ("Step time", "0.25 s", "0.2 s", "1.250"),
        ("Tokens per second", "12,000", "15,000", "0.800"),
        ("Memory of rank 1", "1 GiB", "2 GiB", "0.500"),
        ("Sent by all ranks", "not known", "6.53 MB", ""),
    ]
    note = "Predicted from a profile of Abacus core; lab.yaml."
    assert prediction_note({"prediction": PREDICTION}) == note


def test_what_is_not_known_is_said() -> None:
    unknown = PREDICTION | {"problem": "nobody measured", "predicted": {"memory_gib": [1.0]}}
    found = prediction_rows({"prediction": unknown})
    assert found[0] == ("Step time", "not known", "0.2 s", "")
    assert found[2] == ("Memory of rank 1", "not known", "2 GiB", "")
    assert prediction_note({"prediction": unknown}) == "No time was predicted: nobody measured."


def test_nonsense_in_a_file_is_no_error() -> None:
    for nonsense in (None, 3, [], {}, {"predicted": 3, "measured": {"memory_gib": ["x", None]}}):
        assert prediction_rows({"prediction": nonsense}) == []
        assert prediction_note({"prediction": nonsense}) == ""
    assert prediction_rows({}) == []


def test_the_page_shows_both(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert not [t for t in section(read(run), "Plan").all("table") if "predicted" in t.text]
    change_summary(run, prediction=PREDICTION | {"problem": "<b>why</b>"})
    plan = section(read(run), "Plan")
    assert rows(plan.all("table")[1])[:2] == [
        list(HEADERS),
        ["Step time", "0.25 s", "0.2 s", "1.250"],
    ]
    assert "No time was predicted: <b>why</b>." in plan.text

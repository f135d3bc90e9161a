"""What a page tells of a profiled run: where the time of each rank went, and its memory."""

import json
from pathlib import Path
from typing import Any

import pytest
from report_cases import make_run
from report_page import SECTIONS, read, rows, section


def rank(number: int, computing: float, idle: float) -> dict[str, Any]:
    """As ``weft train --profile`` writes it."""
    names = [("computing", "F", computing), ("computing", "clip", 0.001)]
    names += [("exposed communication", "gradients", 0.02), ("host waits", "gradients", 0.01)]
    parts = {"computing": computing, "exposed communication": 0.02}
    return {
        "rank": number,
        "file": f"rank{number}.json.gz",
        "snapshot": None,
        "step_s": 0.1,
        "from": "kernels",
        "parts_s": {**parts, "host waits": 0.01, "idle": idle},
        "communicating_s": 0.03,
        "names": [{"part": part, "name": name, "s": s} for part, name, s in names],
        "waits_s": {"gradients": 0.01},
        "memory": {
            "kept_bytes": {"parameters": 2**20, "gradients": 2**20, "optimizer": 2**21},
            "peak_bytes": (6 + number) * 2**20,
            "peak_in": "B0.3",
            "actions": [{"name": "B", "peak_bytes": (6 + number) * 2**20}],
            "every_s": 0.001,
            "bytes": [2**22, (6 + number) * 2**20, 2**22],
        },
    }


@pytest.fixture
def profiled(tmp_path: Path) -> Path:
    folder = make_run(tmp_path)
    record = {"steps": [3, 4], "ranks": [rank(0, 0.06, 0.01), rank(1, 0.04, 0.03)]}
    (folder / "profile").mkdir()
    (folder / "profile" / "summary.json").write_text(json.dumps(record))
    return folder


def test_ranks_and_names_are_told(profiled: Path) -> None:
    page = read(profiled)
    assert [h.text for h in page.all("h2")] == [*SECTIONS[:3], "Profile", *SECTIONS[3:]]
    assert page.one("nav").one("a", href="#profile").text == "Profile"
    found = section(page, "Profile")
    by_rank, by_name, by_action = map(rows, found.all("table"))
    assert by_rank[1:] == [
        ["0", "100 ms", "60 ms (60%)", "20 ms (20%)", "10 ms (10%)", "10 ms (10%)", "6.0 MiB",
         "B0.3"],
        ["1", "100 ms", "40 ms (40%)", "20 ms (20%)", "10 ms (10%)", "30 ms (30%)", "7.0 MiB",
         "B0.3"],
    ]  # fmt: skip
    assert by_name[1:] == [
        ["computing", "F forward", "50 ms", "60 ms", "0"],
        ["computing", "clip", "1 ms", "1 ms", "0"],
        ["exposed communication", "gradients", "20 ms", "20 ms", "0"],
        ["host waits", "gradients", "10 ms", "10 ms", "0"],
    ]
    assert by_action[1:] == [["B backward", "7.0 MiB", "1"]]
    tips = [title.text for title in found.all("title")]
    assert {"exposed communication 20 ms", "idle 30 ms", "optimizer 2 MiB"} <= set(tips)
    assert "activations and others 3 MiB" in tips, "7 MiB, of which 4 are kept from step to step"


@pytest.mark.parametrize("text", ["[]", "{", '{"steps": [3, 4], "ranks": []}', '{"steps": 3}'])
def test_a_damaged_summary_is_said(profiled: Path, text: str) -> None:
    (profiled / "profile" / "summary.json").write_text(text)
    page = read(profiled)
    assert [h.text for h in page.all("h2")] == SECTIONS
    assert "profile" in page.all("section")[0].text

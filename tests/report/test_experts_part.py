"""What a page tells of the loads of experts."""

import json
from pathlib import Path

from report_cases import make_run
from report_page import SECTIONS, data_of, everything, read, rows, section

COUNTS = {"1": [6, 0, 2, 0], "3": [1, 3, 2, 2]}


def told(folder: Path) -> None:
    """As ``weft train`` writes it, in every tenth step."""
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if "loss" in record and record["step"] % 10 == 0:
            record |= {"tokens_per_expert": COUNTS, "expert_imbalance": 3.0}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_loads_are_drawn_and_told(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert "Experts" not in [h.text for h in read(run).all("h2")], "a model without"
    told(run)
    page = read(run)
    assert [h.text for h in page.all("h2")] == [*SECTIONS[:3], "Experts", *SECTIONS[3:]]
    found = section(page, "Experts")
    assert "in 10 steps from step 30 to 120" in found.one("p").text
    assert rows(found.one("table"))[1:] == [
        ["layer 1", "80", "3.00 (expert 0)", "0.00 (expert 1)", "2"],
        ["layer 3", "80", "1.50 (expert 1)", "0.50 (expert 0)", "0"],
    ]
    places = [x for x in everything(found) if "bar" in x.attributes.get("class", "")]
    shades = [x.attributes["class"].split()[-1] for x in places]
    assert shades == [
        *("heat-4", "heat-0", "heat-2", "heat-0"),
        *("heat-1", "heat-3", "heat-2", "heat-2"),
    ]
    assert "imbalance of experts 3 at step 10" in data_of(run)["experts"]["description"]
    assert places[0].one("title").text == "layer 1, expert 0: 60 tokens, 3.00 of the mean"


def test_nonsense_is_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    text = (run / "metrics.jsonl").read_text()
    record = {**json.loads(text.splitlines()[-2]), "step": 121, "tokens_per_expert": {"0": [-1]}}
    (run / "metrics.jsonl").write_text(text + json.dumps(record) + "\n")
    assert "Experts" not in [h.text for h in read(run).all("h2")]

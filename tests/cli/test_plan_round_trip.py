"""What ``weft plan`` gives it takes back: the same plan on the same chips, the same forecast."""

import json
from pathlib import Path
from typing import Any

import pytest

from weft.cli.main import run
from weft.plan.plan_file import PlanFile

CLUSTERS = Path(__file__).parents[2] / "examples/clusters"
NARROW = ["plan.schedule=1f1b", "compute.recompute=full"]
"""Leaves the search little to choose."""
LAB = ["debug", "batch.samples=12", "batch.micro=2"]
LARGE = ["demo", "model.size=llama3-8b", "data.seq_len=8192", "batch.micro=2"]
WORDS = {
    "box-8": [*LARGE, "batch.samples=64"],
    "laptop": ["demo"],
    "mix-10k": [*LARGE, "batch.samples=64"],
    "nodes-64": [*LARGE, "batch.samples=64"],
    "old-and-new": [*LARGE, "batch.samples=48"],
    "pods": ["debug", "batch.samples=12", "batch.micro=4"],
    "own-chip": [*LARGE, "batch.samples=32", "batch.micro=1"],
    "two-vendors": [*LARGE, "batch.samples=256"],
    "workstation": ["demo", "batch.samples=8", "batch.micro=1"],
}
"""By cluster; others are labs."""
UNLIKE = {"nodes-64", "old-and-new", "workstation", "mix-1.0-0.5-0.25"}
"""Their plans use several kinds of chip."""


def forecast(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(["plan", *arguments, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


@pytest.mark.parametrize("name", sorted(file.stem for file in CLUSTERS.iterdir()))
def test_a_plan_is_taken_back(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    request.getfixturevalue("hurried" if name in UNLIKE else "first_fitting")
    words = [*WORDS.get(name, LAB), "--cluster", str(CLUSTERS / f"{name}.yaml")]
    found = forecast([*words, *NARROW], capsys)
    if name in UNLIKE:
        assert len({stage["chip"] for stage in found["predicted"]["stages"]}) > 1
    pools = [used["pool"] for used in found["plan"]["chips"]]
    assert pools == sorted(pools), "ranks are not numbered as a launcher would"
    for stage in (each for line in found["plan"]["pipelines"] for each in line["stages"]):
        assert stage["compile"] == (stage["device"] == "cuda"), "as it was priced"
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(found))
    kept = [word for word in words if not word.startswith("batch.micro")]
    again = forecast([*kept, f"plan.file={file}", "plan.schedule=null"], capsys)
    assert again["plan"] == found["plan"]
    assert again["predicted"] == found["predicted"]
    assert PlanFile.read(json.dumps(found["plan"])) == PlanFile.read(file.read_text())

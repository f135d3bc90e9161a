"""Plans that a configuration asks for by stages run, prove themselves, and can be left again."""

import json
from pathlib import Path

import pytest
from cli import commands

from weft.cli.main import run

PLANS = {
    "unlike meshes": ["plan.stages=[{tp: 2, zero: 1, passes: 2}, {dp: 2}]", "plan.schedule=zb-v"],
    "unlike pipelines": [
        "plan.pipelines=[{share: 2, stages: [{zero: 2}, {zero: 2}], schedule: gpipe},"
        "{stages: [{dp: 2, zero: 2, recompute: full}], micro: 3}]"
    ],
    "interleaved": [
        "plan.stages=[{split: [1, 0, 1]}, {}]",
        "plan.schedule=interleaved",
        "plan.chunks=3",
    ],
}


@pytest.mark.parametrize("name", PLANS)
def test_verified(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "tiny.yaml", "model.num_layers=4", "compute.precision=auto"]
    assert run([*arguments, *PLANS[name], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"], found
    assert found["ranks"] >= 2


def test_a_run_changes_from_shares_to_stages_and_back(here: Path) -> None:
    """In fp64: rounding does not show in six digits of the losses of one unbroken run."""
    given = ["train", "tiny.yaml", "compute.precision=fp64", "model.num_layers=2", "--quiet"]
    stages = ["plan.stages=[{dp: 2}, {}]", "plan.schedule=1f1b"]
    assert run([*given, "--out", "whole", "--steps", "6"]) == 0
    assert run([*given, "--out", "mixed", "--steps", "2"]) == 0
    assert run([*given, "--out", "mixed", "--steps", "4", *stages]) == 0
    assert run([*given, "--out", "mixed", "--steps", "6", "plan.shares=[1]"]) == 0
    whole, mixed = (
        [record["loss"] for record in commands.steps(here / out)] for out in ("whole", "mixed")
    )
    assert len(whole) == 6
    assert mixed == pytest.approx(whole, rel=1e-9)
    assert json.loads((here / "mixed/plan.json").read_text())["pipelines"][0]["samples"] == 24

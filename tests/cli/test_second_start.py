"""What is said of a run's last start is of that start alone."""

import json
import shutil
from pathlib import Path
from statistics import fmean, median

import pytest
from cli import commands

from weft.cli.main import run
from weft.report.metrics import read_metrics


def test_checkpoints_that_lie_elsewhere_are_not_begun_again(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither in another folder nor in the run's own, whatever lies in its records."""
    asked = ["train", "tiny.yaml", "--out", "mine", "--quiet"]
    to = f"checkpoint.to={here / 'stored'}"
    assert run([*asked, to, "--steps", "3"]) == 0
    lines = (here / "mine/metrics.jsonl").read_text()
    for other in ("checkpoint.to=null", f"checkpoint.to={here / 'other'}"):
        assert run([*asked, other, "--steps", "5"]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"They lie in {here / 'stored'}: name that, copy them" in said
        assert (here / "mine/metrics.jsonl").read_text() == lines
    shutil.move(here / "stored", here / "other")
    assert run([*asked, f"checkpoint.to={here / 'other'}", "--steps", "4"]) == 0
    assert [each.step for each in read_metrics(here / "mine/metrics.jsonl")[0]] == [1, 2, 3, 4]


def test_two_runs_do_not_share_a_place_of_checkpoints(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each would go on from the other's weights; of a run that is no more they are anybody's."""
    to = f"checkpoint.to={here / 'stored'}"
    asked = ["train", "tiny.yaml", to, "optim.lr=1e-5"]
    assert run(["train", "tiny.yaml", to, "--out", "one", "--steps", "2", "--quiet"]) == 0
    assert run([*asked, "--out", "other", "--steps", "4"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"checkpoint.to = '{here / 'stored'}': expected a place of its own" in said
    assert f"go on with --out {here / 'one'}" in said
    assert not (here / "other").exists()
    shutil.move(here / "one", here / "moved")
    assert run([*asked, "--out", "moved", "--steps", "3"]) == 0, "the same, renamed"
    shutil.rmtree(here / "moved")
    with commands.started(here, "other", to, "optim.lr=1e-5", "--steps", "4") as command:
        code, output, errors = command.finish()
    assert code == 0, errors
    output = " ".join(f"{output} {errors}".split())
    assert f"were begun by the run in {here / 'moved'}" in output
    assert "going on after step 3" in output


def test_numbers_after_a_second_start_are_of_its_steps(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first part was another plan's, and far slower here."""
    end = "train.steps=8"
    assert run(["train", "tiny.yaml", end, "--out", "mine", "--steps", "3", "--quiet"]) == 0
    lines = (here / "mine/metrics.jsonl").read_text().splitlines()
    slower = [json.loads(line) for line in lines]
    for step in slower:
        step["step_time_s"], step["tokens_per_s"] = 1e3, 1e-3
    (here / "mine/metrics.jsonl").write_text("".join(f"{json.dumps(s)}\n" for s in slower))
    asked = [end, "plan.shares=[1,1]", "metrics.report=false", "--out", "mine", "--quiet"]
    assert run(["train", "tiny.yaml", *asked]) == 0
    steps, _ = read_metrics(here / "mine/metrics.jsonl")
    mine = steps[3 + 2 :]
    assert [step.step for step in mine] == [6, 7, 8]
    summary = json.loads((here / "mine/summary.json").read_text())
    assert summary["tokens_per_s"] == median(step.tokens_per_s for step in mine)
    waits = summary["waits"]
    assert len(waits) == 2
    assert {each["step_s"] for each in waits} == {fmean(step.step_time_s for step in mine)}
    assert all(sum(each["waits_s"].values()) <= each["step_s"] for each in waits)
    assert "report.html" not in capsys.readouterr().out, "there is none"


def test_a_finished_run_whose_records_are_lost_ends_well(here: Path) -> None:
    """Its checkpoints were kept elsewhere: nothing is left to train, nor to tell of steps."""
    asked = ["train", "tiny.yaml", "--out", "mine", "--quiet", "--steps", "3"]
    to = f"checkpoint.to={here / 'stored'}"
    assert run([*asked, to]) == 0
    shutil.rmtree(here / "mine")
    assert run([*asked, to]) == 0
    summary = json.loads((here / "mine/summary.json").read_text())
    assert (summary["step"], summary["waits"]) == (3, [])
    assert summary["held_out"]["loss"] > 0

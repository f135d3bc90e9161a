"""``weft compare --bisect`` from the command line: recipes with values, and run folders."""

import json
from pathlib import Path

import pytest
from checkpoint.checkpoint_cases import save

from weft.cli.main import run
from weft.config.load import load_config, to_yaml
from weft.diagnose import divergence
from weft.elastic.failure import Failure, RanksFailedError
from weft.platform.detect import detect
from weft.resolve.resolve import resolve

SMALL = "compute.device=cpu model.num_layers=2"


def run_folder(parent: Path, *overrides: str) -> str:
    """What of a run folder says what was run."""
    loaded = load_config("debug", ["compute.device=cpu", "model.num_layers=2", *overrides])
    parent.mkdir()
    (parent / "config.yaml").write_text(to_yaml(loaded.config))
    (parent / "plan.json").write_text(resolve(loaded, detect()).plan.to_json())
    return str(parent)


def test_two_plans_of_one_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    one = f"debug {SMALL} plan.shares=[1] batch.micro=24"
    assert run(["compare", "--bisect", f"debug {SMALL}", one, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["divergence"] is None and found["precision"] == "fp64" and found["steps"] == 3


def test_what_is_not_compared_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Both sides train on the made-up samples of A."""
    other = f"debug {SMALL} data.mask_documents=true optim.eps=1e-3 train.steps=9 train.log_every=3"
    assert run(["compare", "--bisect", f"debug {SMALL}", other, "--json", "--steps", "1"]) == 0
    said = capsys.readouterr()
    left = ["train.steps", "data.mask_documents", "optim.eps"]
    assert sorted(json.loads(said.out)["not_compared"]) == sorted(left)
    assert all(key in said.err for key in left)


def test_a_setting_that_matters_shows_in_the_update_of_step_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path / "run")
    other = f"debug {SMALL} optim.lr=1e-2"
    assert run(["compare", "--bisect", folder, other, "--json", "--steps", "2"]) == 1
    first = json.loads(capsys.readouterr().out)["divergence"]
    assert (first["step"], first["kind"], first["name"]) == (2, "parameter", "embed.weight")
    assert (first["sample"], first["layer"]) == (None, None)


def test_both_begin_from_the_last_that_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what a rank says of it is said in a line."""
    folder, started = run_folder(tmp_path / "run"), []

    def fails(*_: object, start: Path, **_more: object) -> None:
        started.append(start)
        raise RanksFailedError([Failure(0, "error", "CheckpointError: damaged")])

    monkeypatch.setattr(divergence, "bisect_sides", fails)
    root = tmp_path / "run" / "checkpoints"
    for step in (3, 4):
        last = save(root, step, seed=3)
    next(last.glob("*.safetensors")).unlink()
    assert run(["compare", "--bisect", folder, f"debug {SMALL}", "--full"]) == 1
    assert started == [root / "step-00000003"]
    said = capsys.readouterr().err
    assert "opened step-00000003" in said and "both begin from step 3 of A" in said
    assert said.splitlines()[-1] == "error: rank 0: CheckpointError: damaged"


def test_unlike_models_and_batches_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "debug model.num_layers=3 batch.samples=48"
    assert run(["compare", "--bisect", f"debug {SMALL}", other]) == 2
    said = capsys.readouterr().err
    assert "model: num_layers of B = 3: expected that of A (2)" in said
    assert "batch.samples of B = 48: expected that of A (24)" in said
    assert run(["compare", "--bisect", "debug", "debug 'open"]) == 2
    assert "expected a recipe or file, and values as in a shell" in capsys.readouterr().err
    assert run(["compare", "--bisect", str(tmp_path), "debug"]) == 2
    assert "There is no config.yaml in it" in capsys.readouterr().err

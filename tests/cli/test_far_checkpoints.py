"""A run whose checkpoints lie in a bucket: what fails there costs a checkpoint and no run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint.servers import BUCKET, s3_server
from cli import commands

from weft.checkpoint.remote.owner import Owner, take_turn
from weft.cli.main import run


def test_a_run_keeps_its_checkpoints_in_a_bucket(
    here: Path,
    whole_run: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It goes on from there on a machine that has nothing else of it, bit for bit."""
    to = "checkpoint.to=s3://" + BUCKET + "/runs/{run}"
    with s3_server(monkeypatch) as s3:
        environment = s3.environment
        s3.refuses = lambda method, path: method == "PUT" and "step-00000003/rank-00001" in path
        with commands.started(here, "mine", to, "--steps", "7", environment=environment) as command:
            code, output, errors = command.finish()
        assert code == 0, errors
        file = f"s3://{BUCKET}/runs/mine/step-00000003/rank-00001-"
        assert f"no checkpoint at step 3: {file}" in output + errors
        assert f"checkpoint: s3://{BUCKET}/runs/mine" in output
        assert not (here / "mine/checkpoints").exists()
        assert "secret-of-tests" not in output + errors
        assert run(["checkpoint", "ls", "mine", "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)["checkpoints"]
        assert [(each["step"], each["latest"]) for each in listed] == [(6, False), (7, True)]
        assert run(["checkpoint", "verify", f"s3://{BUCKET}/runs/mine", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["ok"], found["files"]) == (True, 4)
        shutil.move(here / "mine", here / "elsewhere")
        with commands.started(here, "mine", to, "--steps", "9", environment=environment) as command:
            code, output, errors = command.finish()
        assert (code, "going on after step 7" in output) == (0, True), errors
        # Each start takes a turn of its own, which its saves confirm.
        owner = json.loads((s3.place("runs/mine") / "owner.json").read_bytes())
        assert owner["turn"] == 2
        whole = [each for each in commands.numbers(whole_run("fp32")) if ("step", 8) in each]
        assert [each for each in commands.numbers(here / "mine") if ("step", 8) in each] == whole
        with commands.started(here, "mine", to, "seed=7", environment=environment) as command:
            code, _, errors = command.finish()
        assert (code, "seed = 7: expected 1234" in errors) == (2, True)
        more = ("model.num_layers=2", f"checkpoint.load=s3://{BUCKET}/runs/mine", "--steps", "1")
        leave = "checkpoint.allow_missing=['layers.1.*']"
        # Another run takes the turn that this one was about to take.
        s3.holds = lambda method, path: method == "GET" and "runs/mine/step-00000009/rank" in path
        with commands.started(here, "more", to, *more, leave, environment=environment) as command:
            command.wait_until(lambda: bool(s3.held))
            take_turn(s3.place("runs/more"), Owner(host="elsewhere"))
            s3.released.set()
            code, output, errors = command.finish()
        assert code == 1, errors
        assert f"s3://{BUCKET}/runs/more: a run that began on elsewhere at" in errors
        assert f"parameters of s3://{BUCKET}/runs/mine/step-00000009, step 9" in output
        assert "note: not stored, with initial values: layers.1." in output
        first = next(each for each in commands.steps(here / "more"))
        assert first["loss"] < commands.steps(whole_run("fp32"))[0]["loss"]
